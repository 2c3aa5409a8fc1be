#pragma once

#include <cstdlib>
#include <string>

namespace hvd::testing {

/// The rank that the launcher gave this process, before hvd::init(): "0" without a launcher.
inline std::string rank_of_launcher() {
  for (const char* const name : {"OMPI_COMM_WORLD_RANK", "HVD_RANK", "RANK"}) {
    if (const char* const rank = std::getenv(name)) return rank;
  }
  return "0";
}

/// Gives each rank a different NCCL_HOSTID if HVD_TEST_HOSTID_PER_RANK is set, so that NCCL lets
/// ranks share a GPU. Call it before hvd::init().
inline void set_nccl_host_id() {
  if (std::getenv("HVD_TEST_HOSTID_PER_RANK") == nullptr) return;
  ::setenv("NCCL_HOSTID", ("hvd-test-" + rank_of_launcher()).c_str(), 1);
}

}  // namespace hvd::testing
