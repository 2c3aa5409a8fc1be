#include "negotiation/dissemination_barrier.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <random>

#include "hvd/error.h"
#include "negotiation/schedule_replay.h"

namespace hvd::control {
namespace {

using Outcome = ScheduleReplay::Outcome;

AgreedBatch batch(const std::string& name) {
  AgreedBatch agreed;
  agreed.operations.push_back({});
  agreed.operations.back().request.name = name;
  return agreed;
}

/// Hosts with some ranks each, and the updates that are on their way between them, in order between
/// two hosts.
class Hosts {
 public:
  Hosts(int hosts, int ranks)
      : under_way_(static_cast<std::size_t>(hosts),
                   std::vector<std::deque<wire::ReplayUpdate>>(static_cast<std::size_t>(hosts))) {
    for (int host = 0; host < hosts; ++host) {
      auto made = std::make_unique<Host>();
      made->flags = std::vector<ArrivalFlags>(static_cast<std::size_t>(ranks));
      std::vector<ArrivalFlags*> flags;
      for (ArrivalFlags& word : made->flags) flags.push_back(&word);
      for (int rank = 0; rank < ranks; ++rank)
        made->replays.emplace_back(flags, static_cast<std::size_t>(rank), &made->remote);
      made->barrier = std::make_unique<DisseminationBarrier>(flags, made->remote, host, hosts);
      hosts_.push_back(std::move(made));
    }
  }
  std::size_t hosts() const { return hosts_.size(); }
  ScheduleReplay& replay(std::size_t host, std::size_t rank) { return hosts_[host]->replays[rank]; }
  void enter(const std::vector<AgreedBundle>& schedule) {
    for (auto& host : hosts_) {
      for (ScheduleReplay& replay : host->replays) replay.enter(schedule);
    }
  }
  void offer(std::size_t host, std::size_t rank, const std::string& name) {
    wire::Request asked;
    asked.name = name;
    SchedulePlace place;
    replay(host, rank).offer(asked, place);
  }
  /// The first rank of the host checks the flags and sends updates.
  void barrier(std::size_t host) {
    DisseminationBarrier::HostUpdates sent;
    hosts_[host]->barrier->advance(sent);
    for (const auto& [to, update] : sent)
      under_way_[host][static_cast<std::size_t>(to)].push_back(update);
    messages_ += sent.size();
  }
  /// Delivers one message. @return whether there was one
  bool deliver(std::size_t from, std::size_t to) {
    auto& queue = under_way_[from][to];
    if (queue.empty()) return false;
    hosts_[to]->barrier->accept(queue.front());
    queue.pop_front();
    return true;
  }
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t from = 0; from < hosts(); ++from) {
        barrier(from);
        for (std::size_t to = 0; to < hosts(); ++to) moved = deliver(from, to) || moved;
      }
    }
  }
  std::uint64_t messages() const { return messages_; }

 private:
  struct Host {
    std::vector<ArrivalFlags> flags;
    ArrivalFlags remote{};
    std::deque<ScheduleReplay> replays;
    std::unique_ptr<DisseminationBarrier> barrier;
  };
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::vector<std::deque<wire::ReplayUpdate>>> under_way_;  // [from][to]
  std::uint64_t messages_ = 0;
};

TEST(DisseminationBarrier, ABatchRunsOnceEveryRankOfEveryHostHasIt) {
  Hosts hosts(3, 2);
  hosts.enter({{batch("a")}});
  for (std::size_t host = 0; host < 3; ++host) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      for (std::size_t other = 0; other < 3; ++other)
        EXPECT_EQ(hosts.replay(other, 0).advance().outcome, Outcome::kNothing);
      hosts.offer(host, rank, "a");
      hosts.replay(host, rank).advance();
      hosts.settle();
    }
  }
  for (std::size_t host = 0; host < 3; ++host) {
    for (std::size_t rank = 0; rank < 2; ++rank)
      EXPECT_EQ(hosts.replay(host, rank).advance().outcome, Outcome::kRun);
  }
  EXPECT_EQ(hosts.messages(), 3U * 2U) << "as many rounds as three hosts need";
}

TEST(DisseminationBarrier, OneThatLeavesTakesAllWithIt) {
  Hosts hosts(4, 2);
  hosts.enter({{batch("a")}, {batch("b")}});
  for (std::size_t host = 0; host < 3; ++host) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      hosts.offer(host, rank, "a");
      EXPECT_EQ(hosts.replay(host, rank).advance().outcome, Outcome::kNothing);
    }
  }
  hosts.replay(3, 1).leave_soon();
  EXPECT_EQ(hosts.replay(3, 1).advance().outcome, Outcome::kLeft);
  hosts.settle();
  for (std::size_t host = 0; host < 4; ++host) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      if (host == 3 && rank == 1) continue;
      EXPECT_EQ(hosts.replay(host, rank).advance().outcome, Outcome::kLeft)
          << "host " << host << ", rank " << rank;
    }
  }
}

TEST(DisseminationBarrier, TheRequestOfARankThatWaitsInVainReachesOtherHosts) {
  Hosts hosts(5, 1);
  hosts.enter({{batch("a")}});
  for (std::size_t host = 0; host < 4; ++host) {
    hosts.offer(host, 0, "a");
    hosts.replay(host, 0).advance();
  }
  hosts.settle();
  EXPECT_EQ(hosts.replay(4, 0).advance().outcome, Outcome::kNothing);
  hosts.replay(0, 0).request_leave();
  hosts.settle();
  EXPECT_EQ(hosts.replay(4, 0).advance().outcome, Outcome::kLeft);
  hosts.settle();
  for (std::size_t host = 0; host < 4; ++host)
    EXPECT_EQ(hosts.replay(host, 0).advance().outcome, Outcome::kLeft);
}

TEST(DisseminationBarrier, NewsThatNoHostCanHaveAreRefused) {
  std::vector<ArrivalFlags> flags(1);
  ArrivalFlags remote{};
  DisseminationBarrier barrier({flags.data()}, remote, 0, 4);
  EXPECT_THROW(barrier.accept({.position = 3}), Error) << "no host can be two positions ahead";
  EXPECT_THROW(barrier.accept({.position = 1, .round = 2}), Error) << "four hosts take two rounds";
  EXPECT_FALSE(barrier.accept({.position = 0, .leaves = true})) << "an old update";
}

// Ranks act, and updates arrive, in any order; once in a while a rank leaves. Every rank must run
// the same batches and leave at the same position.
TEST(DisseminationBarrier, AllRunTheSameAndLeaveAtTheSamePlaceWhateverTheOrder) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    std::mt19937_64 random(seed);
    const std::size_t count = 2 + seed % 7;
    const std::size_t ranks = 1 + seed % 3;
    Hosts hosts(static_cast<int>(count), static_cast<int>(ranks));
    for (int replay = 0; replay < 3; ++replay) {
      hosts.enter({{batch("a")}, {batch("b")}});
      std::vector<std::uint64_t> runs(count * ranks), offers(count * ranks);
      std::vector<bool> left(count * ranks);
      const auto leaver = static_cast<std::size_t>(random() % (count * ranks));
      const std::uint64_t leaves_at = random() % 6;
      const auto all_left = [&] {
        return std::all_of(left.begin(), left.end(), [](bool gone) { return gone; });
      };
      for (int turn = 0; turn < 200'000 && !all_left(); ++turn) {
        const auto who = static_cast<std::size_t>(random() % (count * ranks));
        const std::size_t host = who / ranks;
        switch (random() % 4) {
          case 0:
            hosts.barrier(host);
            continue;
          case 1:
            hosts.deliver(static_cast<std::size_t>(random() % count), host);
            continue;
          default:
            break;
        }
        if (left[who]) continue;
        if (offers[who] == runs[who])
          hosts.offer(host, who % ranks, offers[who]++ % 2 == 0 ? "a" : "b");
        if (who == leaver && runs[who] >= leaves_at) hosts.replay(host, who % ranks).leave_soon();
        const auto advance = hosts.replay(host, who % ranks).advance();
        if (advance.outcome == Outcome::kRun) ++runs[who];
        if (advance.outcome == Outcome::kLeft) left[who] = true;
      }
      ASSERT_TRUE(all_left()) << "seed " << seed << ": a rank waits forever";
      for (const std::uint64_t own : runs) ASSERT_EQ(own, runs.front()) << "seed " << seed;
      // The next replay begins only after all ranks have negotiated a step. By then the first rank
      // of each host has checked the flags again.
      for (std::size_t host = 0; host < count; ++host) hosts.barrier(host);
    }
  }
}

// A later leave request of another host may arrive first.
TEST(DisseminationBarrier, AWishForTheNextPositionIsNotLostToAnOlderOne) {
  ArrivalFlags own{};
  ArrivalFlags remote{};
  DisseminationBarrier barrier({&own}, remote, 0, 3);
  EXPECT_TRUE(barrier.accept({.position = 2, .requests_leave = true}));
  EXPECT_FALSE(barrier.accept({.position = 1, .requests_leave = true}));
  EXPECT_EQ(remote.leave_requested.load(), 2U);
}

}  // namespace
}  // namespace hvd::control
