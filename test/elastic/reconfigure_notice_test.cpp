// The notices to hvdrun of processes that call hvd::reconfigure().
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "elastic/handles.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "support/fake_supervisor.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// hvdrun's rank 0 is the last rank of the job, so a notice that named rank 2 would name the wrong
// process as the cause.
TEST(ReconfigureNotice, AJobThatIsFormedAnewNamesNoRankOfHvdrun) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    FakeSupervisor supervisor;
    reconfigure(1, exchange_handles(board, 0, own, {2, 1, 0}), kLongTimeout);
    EXPECT_EQ(supervisor.next(), "init 0 -1\n");
    meet(board, 1, own, {0, 1, 2});
    if (own == 0) ::pause();
    EXPECT_THROW(for (;;) barrier(), PeerLostError);
    EXPECT_THAT(supervisor.next(), AllOf(StartsWith("loss 4 -1\n"), HasSubstr("rank 2")));
    reconfigure(2, exchange_handles(board, 2, own, {1, 2}), kLongTimeout);
    EXPECT_EQ(supervisor.next(), "over 0 -1\n") << "of the first job";
    EXPECT_EQ(supervisor.next(), "init 0 -1\n");
    shutdown();
    EXPECT_EQ(supervisor.next(), "left 0 -1\n");
    EXPECT_EQ(supervisor.next(), "over 0 -1\n");
    EXPECT_EQ(supervisor.next(), "");
  });
  for (const int process : {0, 1, 2}) board.read(1, process);
  ranks.kill(0);
  EXPECT_EQ(ranks.wait(0), 128 + SIGKILL);
  ranks.expect_all_succeed();
}

TEST(ReconfigureNotice, AJobOfInitNamesRanksAgain) {
  const std::string place = ::testing::TempDir() + "hvd-notice-" + std::to_string(::getpid());
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    FakeSupervisor supervisor;
    reconfigure(10, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    shutdown();
    for (const char* const notice : {"init 0 -1\n", "left 0 -1\n", "over 0 -1\n"})
      EXPECT_EQ(supervisor.next(), notice);
    init({.init_method = "file://" + place, .rank = own, .world_size = 2});
    EXPECT_EQ(supervisor.next(), "init 0 -1\n");
    meet(board, 1, own, {0, 1});
    if (own == 1) ::pause();
    EXPECT_THROW(for (;;) barrier(), PeerLostError);
    EXPECT_THAT(supervisor.next(), StartsWith("loss 4 1\n"));
  });
  for (const int process : {0, 1}) board.read(1, process);
  ranks.kill(1);
  EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
  ranks.expect_all_succeed();
  std::filesystem::remove_all(place);
}

// hvdrun takes a process that ends with 0 in a job for one that has left the others alone.
TEST(ReconfigureNotice, ACallThatFailsAfterTheArrivalsLeavesTheJob) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    FakeSupervisor supervisor;
    reconfigure(20, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    EXPECT_EQ(supervisor.next(), "init 0 -1\n");
    ::setenv("HVD_CACHE_CAPACITY", own == 0 ? "16" : "32", 1);
    EXPECT_THROW(reconfigure(21, exchange_handles(board, 1, own, {0, 1}), kLongTimeout),
                 UsageError);
    EXPECT_EQ(supervisor.next(), "over 0 -1\n");
    EXPECT_EQ(supervisor.next(), "");
  });
  ranks.expect_all_succeed();
}

}  // namespace
}  // namespace hvd::testing
