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
  /// The longest delay of a packet. Sometimes one direction of a connection is ten times as slow.
  Duration longest_delay{};
  std::uint64_t seed = 0;
  /// The sender's memory of a larger message is read when the receiver requests it.
  std::size_t eager_bytes = 4096;
  /// One message of this many is reported as sent while it still waits for room, until its worker
  /// makes progress.
  unsigned holds_one_of = 4;
};

/// UCX between ranks of one process, below the real carrier. A message arrives after a delay drawn
/// from the seed, in order on each connection and in any order on different ones. Data only moves
/// while a worker makes progress. A message reported as sent may still wait for room, as in a full
/// socket.
///
/// Thread-safe; each worker is used by one thread at a time. Workers share it.
class FakeUcxNetwork : public std::enable_shared_from_this<FakeUcxNetwork> {
 public:
  /// @param clock outlives it
  static std::shared_ptr<FakeUcxNetwork> create(const FakeUcxOptions&, const Clock& clock);
  /// Call it once for each rank.
  ucx::Workers workers(int rank);

  /// Ends the rank's process: its workers stop, and its connections break. The other ranks detect
  /// that after a while, once the messages that were under way have arrived.
  void end(int rank);
  /// The same, but messages under way may be lost.
  void kill(int rank);
  /// Breaks the connections between two ranks, which both detect.
  void cut(int rank, int peer);
  /// The number of connections that all ranks have made.
  int connected() const;

 private:
  friend class FakeUcxWorker;
  struct Packet {
    enum class Kind : std::uint8_t {
      kWhole,     ///< a message
      kAnnounce,  ///< of a large message
      kGoOn,      ///< the receiver requests the data
      kData,      ///< of a large message
      kBroken
    };
    Kind kind = {};
    int from = 0;  ///< the worker
    std::uint64_t id = 0;
    message::Tag tag = 0;
    std::size_t size = 0;
    std::vector<std::byte> bytes = {};
  };
  /// The connection from one worker to another.
  struct Way {
    TimePoint last{};  ///< the latest arrival so far
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
  /// Returns the packets that have arrived, in order. False if the worker has ended.
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
