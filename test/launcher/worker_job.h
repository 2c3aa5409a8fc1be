#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"

namespace hvd::launcher::test {

using Words = std::vector<std::string>;

/// Elastic jobs whose workers have no data plane (programs/worker_program.cpp).
class WorkerJob : public ::testing::Test {
 protected:
  static constexpr const char* kWorker = HVD_TEST_WORKER_PROGRAM;
  static constexpr double kTimeout = 60;  ///< seconds

  void SetUp() override {
    if (!finds_ucx()) GTEST_SKIP() << "needs UCX";
  }
  /// Waits until so many ranks have begun a generation of this size.
  static bool begins(HvdrunProcess& hvdrun, int size, int ranks) {
    return hvdrun.wait_for(" of " + std::to_string(size) + " generation ", ranks, kTimeout);
  }

  const std::string marker_ = unique_marker();
};

}  // namespace hvd::launcher::test
