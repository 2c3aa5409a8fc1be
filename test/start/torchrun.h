#pragma once

#include <string>
#include <vector>

#include "support/process.h"

namespace hvd::testing {

/// Runs two ranks of a program with the torchrun of LibTorch's wheel. torchrun uses a fixed port,
/// and a second one that it releases before rank 0 binds it. So it runs in its own network
/// namespace, if possible, where no other program can take either port.
inline Process::End run_torchrun(const std::vector<std::string>& program,
                                 Environment environment = {}) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const std::vector<std::string> apart = {"unshare", "--net", "sh", "-c",
                                          "ip link set lo up && exec \"$0\" \"$@\""};
  std::vector<std::string> probe = apart;
  probe.emplace_back("true");
  std::vector<std::string> command;
  if (Process(probe, {}).wait(deadline).code == 0) command = apart;
  command.insert(command.end(), {HVD_TORCHRUN, "--no-python", "--nproc-per-node", "2"});
  command.insert(command.end(), program.begin(), program.end());
  environment.insert({{"OMP_NUM_THREADS", "1"}, {"HVD_START_TIMEOUT", "40"}});
  return Process(command, environment).wait(deadline);
}

}  // namespace hvd::testing
