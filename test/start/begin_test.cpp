// Ends the processes of ranks while a job starts through a file or a store. The other ranks of the
// host must detect this at once, long before the start timeout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/process.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kWaitLimit = std::chrono::seconds(60);
/// The start timeout: much longer than the tests.
constexpr const char* kTimeout = "init_timeout=600";

class BeginTest : public ::testing::TestWithParam<const char*> {
 protected:
  BeginTest() {
    std::string made = (std::filesystem::temp_directory_path() / "hvd-begin-test-XXXXXX").string();
    folder_ = ::mkdtemp(made.data());
  }
  ~BeginTest() override { std::filesystem::remove_all(folder_); }

  bool in_store() const { return std::string(GetParam()) == "store"; }
  Process start(int rank, const std::vector<std::string>& before = {},
                const std::string& timeout = kTimeout) const {
    std::vector<std::string> command = before;
    command.insert(
        command.end(),
        {HVD_START_PROGRAM, "init", "world_size=3", timeout, "rank=" + std::to_string(rank),
         in_store() ? "store=" + folder_.string()
                    : "init_method=file://" + (folder_ / "job").string()});
    return Process(command, {});
  }
  bool there_is(const std::string& end_of_name) const {
    namespace fs = std::filesystem;
    std::error_code gone;  // drafts appear and vanish
    for (fs::recursive_directory_iterator entry(folder_, gone), end; entry != end;
         entry.increment(gone)) {
      if (entry->path().filename().string().ends_with(end_of_name)) return true;
      if (gone) return false;
    }
    return false;
  }
  /// Waits for the file of a key of the store.
  void wait_for(const std::string& end_of_name) const {
    const auto deadline = std::chrono::steady_clock::now() + kWaitLimit;
    while (!there_is(end_of_name) && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(there_is(end_of_name)) << end_of_name;
  }
  void wait_for_rank_0() const { wait_for("run"); }
  /// Ranks 0 and 2 then wait for rank 1's part in the second exchange.
  void start_three_of_which_rank_1_is_stopped() {
    ranks_.push_back(start(0));
    wait_for_rank_0();
    ranks_.push_back(start(1));
    wait_for("arrival.1");
    ranks_[1].signal(SIGSTOP);
    ranks_.push_back(start(2));
    wait_for("part.2.2");
  }
  static void expect_loss_of(int rank, Process& seen_by) {
    const auto end = seen_by.wait(std::chrono::steady_clock::now() + kWaitLimit);
    EXPECT_EQ(end.code, 3);
    EXPECT_THAT(end.output, AllOf(HasSubstr("PeerLostError " + std::to_string(rank) + " "),
                                  HasSubstr("ended before the job began")));
  }

  std::filesystem::path folder_;
  std::vector<Process> ranks_;
};

TEST_P(BeginTest, ARankThatEndsBeforeAllHaveJoinedIsNamed) {
  Process rank_0 = start(0);
  wait_for_rank_0();
  Process rank_1 = start(1);
  wait_for("arrival.1");
  rank_1.signal(SIGKILL);
  const auto end = rank_0.wait(std::chrono::steady_clock::now() + kWaitLimit);
  EXPECT_THAT(end.output,
              AllOf(HasSubstr("PeerLostError 1 "), HasSubstr("while rank 2 had not joined")));
}

TEST_P(BeginTest, ARankThatEndsAfterAllHaveJoinedIsNamedOnAll) {
  start_three_of_which_rank_1_is_stopped();
  ranks_[1].signal(SIGKILL);
  expect_loss_of(1, ranks_[0]);
  expect_loss_of(1, ranks_[2]);
}

TEST_P(BeginTest, SoIsRank0) {
  start_three_of_which_rank_1_is_stopped();
  ranks_[0].signal(SIGKILL);
  ranks_[1].signal(SIGCONT);
  expect_loss_of(0, ranks_[1]);
  expect_loss_of(0, ranks_[2]);
}

// A rank that rank 0 has accepted never joins another run.
TEST_P(BeginTest, AnAcceptedRankEndsWithRank0AndTheNextRunBegins) {
  Process first = start(0);
  wait_for_rank_0();
  Process left_behind = start(1);
  wait_for("accepted.1");
  first.signal(SIGKILL);
  expect_loss_of(0, left_behind);
  Process rank_0 = start(0), rank_1 = start(1), rank_2 = start(2);
  for (Process* const rank : {&rank_0, &rank_1, &rank_2}) {
    const auto end = rank->wait(std::chrono::steady_clock::now() + kWaitLimit);
    EXPECT_EQ(end.code, 0) << end.output;
  }
}

// In another pid namespace the rank's pid identifies no process, so the rank does not count as
// lost.
TEST_P(BeginTest, ARankOfAnotherPidNamespaceIsWaitedFor) {
  const std::vector<std::string> apart = {"unshare", "--pid", "--fork", "--kill-child"};
  Process probe({"unshare", "--pid", "--fork", "true"}, {});
  if (probe.wait(std::chrono::steady_clock::now() + kWaitLimit).code != 0)
    GTEST_SKIP() << "needs root for a pid namespace";
  Process rank_0 = start(0, {}, "init_timeout=3");
  wait_for_rank_0();
  Process rank_1 = start(1, apart);
  wait_for("arrival.1");
  rank_1.signal(SIGKILL);
  const auto end = rank_0.wait(std::chrono::steady_clock::now() + kWaitLimit);
  EXPECT_THAT(end.output, AllOf(HasSubstr("PeerLostError 2 "), HasSubstr("rank 2 has not joined"),
                                Not(HasSubstr("ended before the job"))));
}

INSTANTIATE_TEST_SUITE_P(Place, BeginTest, ::testing::Values("file", "store"),
                         [](const auto& parameter) { return std::string(parameter.param); });

}  // namespace
}  // namespace hvd::testing
