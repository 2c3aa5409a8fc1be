#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
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

  /// Expects that hvdrun refuses each of the options with one line that contains a text.
  static void expect_refused(const std::vector<std::pair<Words, std::string>>& inputs) {
    for (const auto& [options, message] : inputs) {
      Start start;
      start.arguments = options;
      start.arguments.emplace_back("true");
      const Result result = HvdrunProcess(start).wait(kTimeout);
      EXPECT_EQ(result.code, 2) << result.err;
      EXPECT_THAT(result.err, ::testing::HasSubstr(message));
      EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    }
  }

  /// An argument of workers that do not end before the gate is open.
  std::string until_gate() const { return "until=" + gate_.path(); }

  const std::string marker_ = unique_marker();
  const Gate gate_{};
};

}  // namespace hvd::launcher::test
