#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime.h"
#include "support/local_network.h"

namespace hvd::testing {

/// A clock that only advance() moves. Thread-safe.
class VirtualClock final : public Clock {
 public:
  TimePoint now() const noexcept override { return TimePoint(now_.load()); }
  void advance(Duration by) noexcept { now_.fetch_add(by.count()); }

 private:
  std::atomic<TimePoint::rep> now_{std::chrono::nanoseconds(std::chrono::hours(1)).count()};
};

/// The transport of a rank's messages and data.
struct RankWorld {
  std::unique_ptr<control::ControlPlane> plane = {};
  std::vector<std::shared_ptr<Backend>> backends = {};
};

struct LocalJobOptions {
  int size = 2;
  runtime::RuntimeOptions runtime = {};
  Duration longest_delay{};
  std::uint64_t seed = 0;
  /// The host of each rank; default: all on one.
  std::vector<std::string> hosts = {};
  bool rings_across_hosts = true;
  std::vector<std::string> shared_memory_prefixes = {};  ///< as in NetworkOptions
  /// Replaces the local backend.
  std::shared_ptr<Backend> backend = {};
  /// Called for each rank; the result replaces the local network and backend.
  std::function<RankWorld(int rank)> world = {};
  /// Called for each rank; return its GPU, and a backend besides the local one.
  std::function<std::shared_ptr<device::Context>(int rank)> device = {};
  std::function<std::shared_ptr<Backend>(int rank, std::shared_ptr<device::Context>,
                                         std::shared_ptr<Backend> local)>
      device_backend = {};
};

/// The ranks of a job inside this process, on the local network and backend or others. With
/// `runtime.background_thread` off, step_all() or run_until() drives them all from the calling
/// thread, in an order drawn from the seed.
class LocalJob {
 public:
  LocalJob(const LocalJobOptions&, const Clock&);
  ~LocalJob();

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  runtime::Runtime& rank(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  LocalNetwork& network() { return *network_; }
  /// Simulates that the rank's process is killed.
  void kill(int rank);

  /// Shuts the rank down and destroys its runtime, as a process does. Call it from a separate
  /// thread for each rank.
  void leave(int rank) {
    this->rank(rank).shutdown();
    ranks_[static_cast<std::size_t>(rank)].reset();
  }

  /// Runs one round of every living rank. @return whether any rank made progress
  bool step_all();
  /// Steps all ranks and advances the clock until `done` returns true. @return false when
  /// `timeout` of virtual time has passed first
  template <class Done>
  bool run_until(VirtualClock& clock, Duration timeout, const Done& done) {
    const TimePoint limit = clock.now() + timeout;
    while (!done()) {
      if (clock.now() > limit) return false;
      const bool moved = step_all();
      clock.advance(moved ? std::chrono::microseconds(1) : std::chrono::microseconds(200));
    }
    return true;
  }
  /// Shuts all living ranks down at the same time.
  void shut_down();

 private:
  std::mt19937_64 random_;
  std::shared_ptr<LocalNetwork> network_;
  std::vector<std::shared_ptr<runtime::Runtime>> ranks_;
};

}  // namespace hvd::testing
