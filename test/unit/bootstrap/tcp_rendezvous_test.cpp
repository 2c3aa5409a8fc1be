#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/open_store.h"
#include "bootstrap/rendezvous.h"
#include "support/seeds.h"
#include "unit/bootstrap/ports.h"
#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace std::chrono_literals;

OpenStore at_new_port() {
  return [url = "tcp://localhost:" + std::to_string(free_port())](
             const RankInfo& own, Deadline deadline) { return open_store(url, own, deadline); };
}
INSTANTIATE_TEST_SUITE_P(Tcp, AnyStore, ::testing::Values(&at_new_port));

class TcpRendezvousTest : public ::testing::Test {
 protected:
  std::string method(const std::string& host = "localhost") const {
    return "tcp://" + host + ":" + std::to_string(port);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join_at(method(), info(rank, size), deadline);
  }
  static std::unique_ptr<Rendezvous> join_at(const std::string& url, const RankInfo& own,
                                             Deadline deadline = soon()) {
    return Rendezvous::join(open_store(url, own, deadline), own, {}, deadline);
  }
  std::function<void()> joins(int rank, int size) const {
    return [this, rank, size] { join_as(rank, size)->leave(soon()); };
  }

  const std::uint16_t port = free_port();
};

TEST_F(TcpRendezvousTest, Rank0NamesAHostThatDoesNotResolve) {
  // The name is too long for the name service, which fails at once.
  const std::string host(300, 'x');
  EXPECT_THAT(outcome_of([&] { join_at(method(host), info(0, 2), in(2s)); }),
              AllOf(HasSubstr("lost 1: "), HasSubstr(" s (HVD_START_TIMEOUT)"),
                    HasSubstr("'" + host + "' does not resolve"),
                    HasSubstr("on the host of rank 0, so others may not find it either")));
}

TEST_F(TcpRendezvousTest, AStrangerDoesNotDisturbTheJob) {
  EXPECT_THAT(all_of({joins(0, 2),
                      [&] {
                        for (const std::string& bytes :
                             {std::string("GET / HTTP/1.1\r\n\r\n"),
                              std::string("\x08\0\0\0\xff\xff\xff\xff....", 12), std::string()})
                          send_to(port, bytes);
                        joins(1, 2)();
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, NamesARefusedProcessWhenItsRankIsMissing) {
  RankInfo stranger = info(1, 2);
  stranger.token = "guess";
  const auto outcomes =
      all_of({[&] { join_as(0, 2, in(6s)); }, [&] { join_at(method(), stranger, in(1s)); }});
  EXPECT_THAT(outcomes[0],
              AllOf(StartsWith("lost 1: "),
                    HasSubstr("that joined as rank 1 was refused: it has another token"),
                    Not(HasSubstr("secret")), Not(HasSubstr("guess"))));
  EXPECT_THAT(outcomes[1], AllOf(StartsWith("usage: "), HasSubstr("another token")));
}

TEST_F(TcpRendezvousTest, RefusesARankStartedTwiceAndKeepsTheFirst) {
  std::vector<std::string> twice(2);
  const auto outcomes = all_of({joins(0, 3), [&] { twice[0] = outcome_of(joins(1, 3)); },
                                [&] { twice[1] = outcome_of(joins(1, 3)); },
                                [&] {
                                  std::this_thread::sleep_for(300ms);
                                  joins(2, 3)();
                                }});
  EXPECT_THAT(outcomes, Each("fine"));
  EXPECT_THAT(twice, ::testing::UnorderedElementsAre(
                         "fine", AllOf(HasSubstr("usage: "), HasSubstr("has joined at"),
                                       HasSubstr("twice, first from host"))));
}

// Rank 0 serves until the others have left.
TEST_F(TcpRendezvousTest, ALaterExchangeEndsWithTheFailureOfRank0) {
  std::promise<void> failed;
  const auto outcomes = all_of({[&] {
                                  const auto joined = join_as(0, 2);
                                  joined->fail({.text = "rank 0 has no GPU"});
                                  failed.set_value();
                                  joined->leave(soon());
                                },
                                [&] {
                                  const auto joined = join_as(1, 2);
                                  failed.get_future().wait();
                                  std::this_thread::sleep_for(50ms);
                                  try {
                                    joined->exchange("segment", {}, soon());
                                  } catch (...) {
                                    joined->leave(soon());
                                    throw;
                                  }
                                }});
  EXPECT_EQ(outcomes[1], "error: rank 0 has no GPU");
}

TEST_F(TcpRendezvousTest, ReportsARankThatEndsBeforeAllHaveJoined) {
  EXPECT_THAT(
      all_of({[&] { join_as(0, 3); }, [&] { run_and_kill([&] { join_as(1, 3); }, 300ms); }})[0],
      AllOf(StartsWith("lost 1: "), HasSubstr("rank 1 (host"),
            HasSubstr("ended before the job began")));
}

// A process that expects another number of ranks is refused alone. Its end before the refusal does
// not end the job.
TEST_F(TcpRendezvousTest, AStrayThatEndsBeforeItsRefusalEndsNoJob) {
  std::unique_ptr<Rendezvous> zero;
  const auto begin = [this](const RankInfo& own) {
    return Rendezvous::begin(open_store(method(), own, soon()), own, {}, soon());
  };
  run_and_kill(
      [&] {
        const auto stray = begin(info(1, 4));
        for (;;) stray->step(in(10ms));
      },
      500ms, [&] { zero = begin(info(0, 3)); });
  EXPECT_THAT(all_of({[&] {
                        while (!zero->step(in(50ms))) continue;
                        zero->leave(soon());
                      },
                      joins(1, 3),
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        joins(2, 3)();
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, TheEndOfRank0IsAnErrorAtOnce) {
  const auto outcomes =
      all_of({[&] { join_as(0, 2); }, [&] { join_as(1, 2)->exchange("segment", {}, soon()); }});
  EXPECT_THAT(outcomes[1], StartsWith("lost 0: "));
}

// The ranks of a run whose rank 0 was killed do not join the next run at the same port, which has
// the same name and token.
TEST_F(TcpRendezvousTest, RanksOfARunWhoseRank0EndedDoNotJoinTheNext) {
  std::vector<std::string> old(2);
  std::vector<std::jthread> leftover;
  run_and_kill([&] { join_as(0, 4); }, 500ms,
               [&] {
                 for (int rank : {1, 2})
                   leftover.emplace_back([&, rank] {
                     old[static_cast<std::size_t>(rank) - 1] = outcome_of(joins(rank, 4));
                   });
               });
  leftover.clear();  // they end at once
  EXPECT_THAT(old, Each(StartsWith("lost 0: ")));
  EXPECT_THAT(all_of({joins(0, 4), joins(1, 4), joins(2, 4), joins(3, 4)}), Each("fine"));
}

/// Raises the limit of descriptors. Returns false if the system does not allow it.
bool allow_descriptors(rlim_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= count) return true;
  limit.rlim_cur = count;
  return limit.rlim_max >= count && ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

// 2,000 in a long run.
TEST_F(TcpRendezvousTest, ManyRanksBeginInTime) {
  const int ranks = testing::long_run() ? 2000 : 200;
  if (!allow_descriptors(static_cast<rlim_t>(2 * ranks + 100)))
    GTEST_SKIP() << "too few descriptors";
  const std::string payload(100, 'x');  // all ranks of this test keep all payloads in one process
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::function<void()>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back([&, rank] {
      const RankInfo own = info(rank, ranks);
      const auto joined =
          Rendezvous::join(open_store(method(), own, soon()), own, bytes_of(payload), soon());
      EXPECT_EQ(joined->parts().size(), static_cast<std::size_t>(ranks));
      joined->exchange("segment", bytes_of("s"), soon());
      joined->exchange("mapping", bytes_of("m"), soon());
      joined->leave(soon());
    });
  }
  EXPECT_THAT(all_of(all), Each("fine"));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%d ranks: %.1f s\n", ranks, seconds.count());
  EXPECT_LT(seconds.count(), 30);
}

}  // namespace
}  // namespace hvd::rendezvous
