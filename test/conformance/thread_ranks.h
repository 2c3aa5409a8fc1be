#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/doorbell.h"
#include "conformance/conformance_suite.h"
#include "support/fakes.h"
#include "support/watchdog.h"

/// Ranks that are threads of one process, for backends that do not need processes.
namespace hvd::conformance {

inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// The doorbells of all ranks. Thread-safe.
using Doorbells = std::deque<Doorbell>;

/// Peers that ring these doorbells.
inline testing::FakePeers peers_of(int rank, Doorbells& doorbells) {
  return testing::FakePeers(rank, static_cast<int>(doorbells.size()), [&doorbells](int other) {
    doorbells[static_cast<std::size_t>(other)].ring();
  });
}

/// The parts that a rank owns.
struct RankParts {
  std::unique_ptr<Backend> backend = {};
  std::unique_ptr<std::pmr::memory_resource> memory = {};  ///< null: the default resource
  bool polls = false;  ///< the transport makes progress without a ring
};
/// Called by each rank's thread.
using MakeParts = std::function<RankParts(int rank)>;

/// A rank that is a thread. Unless it polls, it sleeps whenever it cannot go on, so a missing ring
/// fails the test.
class ThreadHarness final : public Harness {
 public:
  ThreadHarness(int rank, Doorbells& doorbells, RankParts parts)
      : memory_(std::move(parts.memory)),
        polls_(parts.polls),
        doorbell_(doorbells[static_cast<std::size_t>(rank)]),
        peers_(peers_of(rank, doorbells)),
        backend_(std::move(parts.backend)) {
    channel_ = backend_->open({.ranks = all_ranks(peers_.size()), .set_rank = rank}, peers_);
  }

  int rank() const override { return peers_.rank(); }
  int size() const override { return peers_.size(); }
  Channel& channel() override { return *channel_; }
  std::pmr::memory_resource& memory() override { return memory_ ? *memory_ : Harness::memory(); }

  void run(Work& work) override {
    started_.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
      const std::uint32_t ticket = doorbell_.ticket();
      if (work.progress()) {
        return;
      }
      if (work.moved()) continue;
      if (polls_) {
        std::this_thread::yield();
        continue;
      }
      const TimePoint asleep_since = SteadyClock().now();
      doorbell_.sleep(ticket, Doorbell::Sleeper::kStandby, kLongestSleep);
      if (SteadyClock().now() - asleep_since >= kLongestSleep) {
        throw std::runtime_error("rank " + std::to_string(rank()) + " was not woken");
      }
    }
  }

 private:
  static constexpr Duration kLongestSleep = std::chrono::seconds(60);

  std::unique_ptr<std::pmr::memory_resource> memory_;
  const bool polls_;

  Doorbell& doorbell_;
  testing::FakePeers peers_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Channel> channel_;
  std::atomic<int> started_{0};
  testing::WatchdogNote note_{[this] {
    return "rank " + std::to_string(rank()) + ": in collective " +
           std::to_string(started_.load(std::memory_order_relaxed));
  }};
};

template <class Body>
void run_threads(int size, const MakeParts& make_parts, const Body& body) {
  Doorbells doorbells(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadHarness harness(rank, doorbells, make_parts(rank));
      try {
        body(harness);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
}

}  // namespace hvd::conformance
