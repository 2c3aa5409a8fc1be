#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/ucx/worker.h"

namespace hvd::testing {

struct FakeUcxOptions {
  int size = 2;
  /// Of a packet. Now and then a connection is ten times as slow, one way.
  Duration longest_delay{};
  std::uint64_t seed = 0;
  /// Of a larger message the sender's memory is read when the receiver has asked for it.
  std::size_t eager_bytes = 4096;
  /// One message of so many is called sent while it waits for room: until its worker is let work.
  unsigned holds_one_of = 4;
};

/// UCX between ranks of one process, below the real carrier: what a worker sends arrives there
/// after a delay drawn from the seed, in order on each connection and in any order on different
/// ones, and everything that moves does so while its worker is let work. What a worker calls sent
/// may still wait there for room, as in a socket that is full.
///
/// Thread-safe; each worker is used by one thread at a time. Workers share it.
class FakeUcxNetwork : public std::enable_shared_from_this<FakeUcxNetwork> {
 public:
  /// @param clock outlives it
  static std::shared_ptr<FakeUcxNetwork> create(const FakeUcxOptions&, const Clock& clock);
  /// Once for each rank.
  ucx::Workers workers(int rank);

  /// The rank's process ends: its workers do nothing any more. Its connections break, which the
  /// others see after a while, and after what was on its way.
  void end(int rank);
  /// The same, and what was on its way may be lost.
  void kill(int rank);
  /// The connections between two ranks break, and both see it.
  void cut(int rank, int peer);
  /// Connections that were made, by all.
  int connected() const;

 private:
  friend class FakeUcxWorker;
  struct Packet {
    enum class Kind : std::uint8_t {
      kWhole,     ///< a message
      kAnnounce,  ///< of a large one
      kGoOn,      ///< its receiver has room
      kData,      ///< of it
      kBroken
    };
    Kind kind = {};
    int from = 0;  ///< the worker
    std::uint64_t id = 0;
    message::Tag tag = 0;
    std::size_t size = 0;
    std::vector<std::byte> bytes = {};
  };
  /// From one worker to another.
  struct Way {
    TimePoint last{};  ///< arrival
    int slowness = 1;
    bool broken = false;
  };
  struct Station {
    std::multimap<TimePoint, Packet> coming = {};
    bool ended = false;
  };

  FakeUcxNetwork(const FakeUcxOptions&, const Clock&);
  static int worker_of(int rank, ucx::Side side) {
    return rank * static_cast<int>(ucx::kSides) + static_cast<int>(side);
  }
  static int rank_of(int worker) { return worker / static_cast<int>(ucx::kSides); }
  // For workers.
  void connect(int from, int to);
  void deliver(int to, Packet);
  /// The packets that have come, in order. False: it has ended.
  bool collect(int worker, std::vector<Packet>& come);
  void end_worker(int worker);
  std::uint64_t draw(std::uint64_t below);

  // With the lock held.
  Way& way_between(int from, int to);
  void put(int to, Packet);
  void break_ways(int one, int other, bool loses);

  const FakeUcxOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;                   // guarded by mutex_
  std::vector<Station> stations_;            // guarded by mutex_
  std::map<std::pair<int, int>, Way> ways_;  // guarded by mutex_
  int connected_ = 0;                        // guarded by mutex_
};

}  // namespace hvd::testing
