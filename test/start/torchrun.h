#pragma once

#include <string>
#include <vector>

#include "start/processes.h"

namespace hvd::testing {

/// Two ranks of a program, by the torchrun of the wheel that LibTorch is from.
inline Process::End run_torchrun(const std::vector<std::string>& program,
                                 Environment environment = {}) {
  std::vector<std::string> command = {HVD_TORCHRUN, "--no-python", "--nproc-per-node", "2"};
  command.insert(command.end(), program.begin(), program.end());
  environment.insert({{"OMP_NUM_THREADS", "1"}, {"HVD_START_TIMEOUT", "40"}});
  return Process(command, environment)
      .wait(std::chrono::steady_clock::now() + std::chrono::seconds(100));
}

inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace hvd::testing
