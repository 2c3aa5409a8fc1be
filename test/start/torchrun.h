#pragma once

#include <string>
#include <vector>

#include "start/processes.h"

namespace hvd::testing {

/// Two ranks of a program, by the torchrun of the wheel that LibTorch is from. It asks for a fixed
/// port, and for one that it lets go before rank 0 has it. So that nobody else takes either, it
/// runs in a network of its own, where that can be had.
inline Process::End run_torchrun(const std::vector<std::string>& program,
                                 Environment environment = {}) {
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const std::vector<std::string> apart = {"unshare", "--net", "sh", "-c",
                                          "ip link set lo up && exec \"$0\" \"$@\""};
  std::vector<std::string> probe = apart;
  probe.emplace_back("true");
  std::vector<std::string> command;
  if (Process(probe, {}).wait(patience).code == 0) command = apart;
  command.insert(command.end(), {HVD_TORCHRUN, "--no-python", "--nproc-per-node", "2"});
  command.insert(command.end(), program.begin(), program.end());
  environment.insert({{"OMP_NUM_THREADS", "1"}, {"HVD_START_TIMEOUT", "40"}});
  return Process(command, environment).wait(patience);
}

}  // namespace hvd::testing
