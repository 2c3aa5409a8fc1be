#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gpu/program_device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::testing {

/// hvd::init() as the settings of CMakeLists.txt want it. False, and the reason is printed: this
/// job cannot be here.
inline bool init_gpu_job() {
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (!ProgramDevice::prepare(rank != nullptr ? std::atoi(rank) : 0)) {
    std::printf("skipped: no GPU\n%s", build_info().c_str());
    return false;
  }
  if (std::getenv("HVD_TEST_HOSTID_PER_RANK") != nullptr)
    ::setenv("NCCL_HOSTID", (std::string("hvd-test-") + (rank != nullptr ? rank : "0")).c_str(), 1);
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
