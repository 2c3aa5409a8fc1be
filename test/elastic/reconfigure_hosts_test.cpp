// The errors of hvd::reconfigure() on two "hosts" with a network of their own, which cannot watch
// each other's processes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "elastic/handles.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "support/two_hosts.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ReconfigureHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }

  /// Moves this process to a host.
  void enter(int host) const {
    const std::string path = "/run/netns/" + hosts_.name(host);
    const int network = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(::setns(network, CLONE_NEWNET), 0) << path;
    ::close(network);
    ASSERT_EQ(::unshare(CLONE_NEWUTS), 0);
    ::sethostname(hosts_.name(host).c_str(), hosts_.name(host).size());
  }

  /// Process 0 is alone on host 0, and 1 and 2 are on host 1.
  void run(const std::function<void(int)>& process,
           const std::function<void(ForkedRanks&)>& meanwhile = {}) const {
    ForkedRanks ranks(3,
                      [&](int own) {
                        enter(own == 0 ? 0 : 1);
                        process(own);
                      },
                      {0});
    if (meanwhile) meanwhile(ranks);
    ranks.expect_all_succeed();
  }

  static void kill(ForkedRanks& ranks, int process) {
    ranks.kill(process);
    EXPECT_EQ(ranks.wait(process), 128 + SIGKILL);
  }

  const TwoHosts hosts_;
  const std::vector<int> all_{0, 1, 2};
};

TEST_F(ReconfigureHosts, RanksOfTwoHostsFormAJob) {
  Blackboard board;
  run([&](int own) {
    reconfigure(1, exchange_handles(board, 0, own, all_), kLongTimeout);
    EXPECT_EQ(size(), 3);
    EXPECT_EQ(rank(), own);
    barrier();
    shutdown();
  });
}

TEST_F(ReconfigureHosts, ARankZeroThatHasEndedIsNamed) {
  Blackboard board;
  run(
      [&](int own) {
        const auto handles = exchange_handles(board, 0, own, all_);
        meet(board, 1, own, all_);
        if (own == 0) ::pause();
        board.read(2, 0);
        const std::string error = error_of(2, handles, kShortTimeout, 0);
        EXPECT_THAT(error, AllOf(HasSubstr("rank 0 of 3 (host " + hosts_.name(0)),
                                 HasSubstr("Connection refused")));
        reconfigure(3, exchange_handles(board, 3, own, {1, 2}), kLongTimeout);
        barrier();
        shutdown();
      },
      [&](ForkedRanks& ranks) {
        board.read(1, 0);
        kill(ranks, 0);
        board.post(2, 0);
      });
}

TEST_F(ReconfigureHosts, ARankZeroThatEndsWhileTheOthersWaitIsNamed) {
  Blackboard board;
  run(
      [&](int own) {
        const auto handles = exchange_handles(board, 0, own, all_);
        if (own == 0) ::pause();
        board.post(1, own);
        // The member that ends at once is not the cause.
        const std::string error = error_of(4, handles, kLongTimeout, 0);
        EXPECT_THAT(error, HasSubstr("rank 0 of 3 (host " + hosts_.name(0)));
      },
      [&](ForkedRanks& ranks) {
        board.read(1, 1);
        board.read(1, 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        kill(ranks, 0);
      });
}

TEST_F(ReconfigureHosts, ARankZeroThatDoesNotCallIsNamedAtTheDeadline) {
  Blackboard board;
  run([&](int own) {
    const auto handles = exchange_handles(board, 0, own, all_);
    if (own != 0) {
      const std::string error = error_of(5, handles, kShortTimeout, 0);
      EXPECT_THAT(error, AllOf(HasSubstr("rank 0 of 3 (host " + hosts_.name(0)),
                               HasSubstr("has not joined at tcp://" + TwoHosts::address(0))));
    }
    meet(board, 1, own, all_);
  });
}

// Rank 0 has given up by then, and the cause is on this host.
TEST_F(ReconfigureHosts, AMemberHereThatHadEndedBeforeIsNamedWithoutRankZero) {
  Blackboard board;
  run(
      [&](int own) {
        const auto handles = exchange_handles(board, 0, own, all_);
        meet(board, 1, own, all_);
        if (own != 2) ::pause();
        board.read(2, 2);
        EXPECT_THAT(error_of(10, handles, kLongTimeout, 1),
                    HasSubstr("rank 1 of 3 (host " + hosts_.name(1)));
      },
      [&](ForkedRanks& ranks) {
        for (const int process : all_) board.read(1, process);
        for (const int ended : {0, 1}) kill(ranks, ended);
        board.post(2, 2);
      });
}

TEST_F(ReconfigureHosts, ARankZeroWhoseHandleIsUsedUpIsNamed) {
  Blackboard board;
  run([&](int own) {
    const auto handles = exchange_handles(board, 0, own, all_);
    if (own == 0) reconfigure(6, {handles[0]}, kLongTimeout);
    meet(board, 1, own, all_);
    if (own != 0) {
      EXPECT_THAT(error_of(7, handles, kLongTimeout, 0),
                  AllOf(HasSubstr("rank 0 of 3 (host " + hosts_.name(0)),
                        HasSubstr("or it has given up this call, or its handle is used up")));
    }
    meet(board, 2, own, all_);
    if (own == 0) shutdown();
  });
}

TEST_F(ReconfigureHosts, MembersOnTheOtherHostAreNamedByRankZero) {
  Blackboard board;
  run(
      [&](int own) {
        const auto handles = exchange_handles(board, 0, own, all_);
        if (own == 1) ::pause();
        board.post(1, own);
        EXPECT_THAT(error_of(8, handles, kShortTimeout, 1),
                    HasSubstr("rank 1 of 3 (host " + hosts_.name(1)));
        meet(board, 2, own, {0, 2});
      },
      [&](ForkedRanks& ranks) {
        board.read(1, 0);
        board.read(1, 2);
        kill(ranks, 1);
      });
}

TEST_F(ReconfigureHosts, AHostThatIsCutOffIsNamed) {
  Blackboard board;
  run([&](int own) {
    const auto handles = exchange_handles(board, 0, own, all_);
    meet(board, 1, own, all_);
    if (own == 0) EXPECT_TRUE(hosts_.cut(0));
    meet(board, 2, own, all_);
    const std::string error = error_of(9, handles, kShortTimeout, own == 0 ? -1 : 0);
    EXPECT_THAT(error, HasSubstr(own == 0 ? "ranks 1 and 2 have not joined"
                                          : "rank 0 of 3 (host " + hosts_.name(0)));
    meet(board, 3, own, all_);
  });
}

}  // namespace
}  // namespace hvd::testing
