#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "support/process.h"
#include "support/two_hosts.h"

namespace hvd::testing {

/// A torchrun on each of two hosts, with two ranks each. Skipped, with the reason, where such hosts
/// cannot be made.
class TorchrunHosts : public ::testing::Test {
 protected:
  static constexpr int kPort = 29400;  ///< of the first host, which no other program uses
  static constexpr auto kTimeout = std::chrono::seconds(80);

  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }

  Process& at(int host) { return runs_.at(static_cast<std::size_t>(host)); }

  /// torchrun's default for several hosts.
  void start_static(const std::vector<std::string>& program, const Environment& environment = {}) {
    for (const int host : {0, 1}) {
      start(host,
            {"--node-rank", std::to_string(host), "--master-addr", TwoHosts::address(0),
             "--master-port", std::to_string(kPort)},
            program, environment);
    }
  }
  void start_c10d(const std::vector<std::string>& program, const Environment& environment = {}) {
    for (const int host : {0, 1}) {
      start(host,
            {"--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint",
             TwoHosts::address(0) + ":" + std::to_string(kPort)},
            program, environment);
    }
  }
  void start(int host, const std::vector<std::string>& options,
             const std::vector<std::string>& program, Environment environment) {
    std::vector<std::string> command = hosts_.prefix(host);
    const auto add = [&command](const std::vector<std::string>& more) {
      command.insert(command.end(), more.begin(), more.end());
    };
    add({HVD_TORCHRUN, "--no-python", "--nnodes", "2", "--nproc-per-node", "2"});
    add(options);
    add(program);
    environment.insert({{"OMP_NUM_THREADS", "1"}, {"HVD_START_TIMEOUT", "40"}});
    runs_.emplace_back(command, environment);
  }

  /// Expects both torchruns to end with 0, and returns the output of their ranks.
  std::string wait_for_both() {
    std::string written;
    for (Process& run : runs_) {
      const auto end = run.wait(deadline_);
      EXPECT_EQ(end.code, 0) << end.output;
      written += end.output;
    }
    return written;
  }
  /// Waits until all four ranks work.
  void expect_both_run() {
    for (const int host : {0, 1})
      ASSERT_TRUE(at(host).wait_for("RUNNING ", 2, deadline_)) << at(host).written();
  }
  /// Expects the ranks of the host to report the loss of a rank of the other host. torchrun may end
  /// one of them before it reports.
  void expect_losses_at(int host) {
    const std::vector<std::string> lost = ranks_of(1 - host);
    const Process::End end = at(host).wait(deadline_);
    int named = 0;
    for (const std::string& rank : lost)
      named += count(end.output, "\nPeerLostError " + rank + " lost rank " + rank + " (host " +
                                     hosts_.name(1 - host) + ")");
    EXPECT_NE(end.code, 0) << end.output;
    EXPECT_GE(named, 1) << end.output;
    EXPECT_EQ(named, count(end.output, "\nPeerLostError ")) << end.output;
  }

  const TwoHosts hosts_;
  const std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + kTimeout;

 private:
  /// Reads a host's ranks from its output, because c10d gives the first ranks to the host that
  /// joins first.
  std::vector<std::string> ranks_of(int host) {
    static const std::string kWord = "RUNNING ";
    std::vector<std::string> ranks;
    const std::string& text = at(host).written();
    for (auto found = text.find(kWord); found != std::string::npos;
         found = text.find(kWord, found + 1))
      ranks.push_back(text.substr(found + kWord.size(), 1));
    return ranks;
  }

  std::vector<Process> runs_;
};

}  // namespace hvd::testing
