#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gpu/nccl_host_id.h"
#include "gpu/program_device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::testing {

/// Calls hvd::init() with the settings of CMakeLists.txt. Returns false, and prints the reason, if
/// this host cannot run the job.
inline bool init_gpu_job() {
  if (!ProgramDevice::prepare(std::stoi(rank_of_launcher()))) {
    std::printf("skipped: no GPU\n%s", build_info().c_str());
    return false;
  }
  set_nccl_host_id();
  try {
    init();
  } catch (const UsageError& error) {
    const bool cannot = std::string(error.what()).find("share the GPU") != std::string::npos;
    if (!cannot || std::getenv("HVD_TEST_SKIP_UNSHARED") == nullptr) throw;
    std::printf("skipped: %s (NCCL lets ranks share a GPU from 2.30 on)\n%s", error.what(),
                build_info().c_str());
    return false;
  }
  return true;
}

}  // namespace hvd::testing
