#include "doctor/cpu_pairs.h"

#include <hwloc.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "base/text.h"

namespace hvd::launcher::doctor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kMeasureFor{40};
constexpr std::chrono::milliseconds kGiveUpAfter{400};
constexpr int kRoundTripsPerSample = 20;

std::shared_ptr<hwloc_topology> load_topology(const std::optional<std::string>& synthetic) {
  hwloc_topology_t made = nullptr;
  if (::hwloc_topology_init(&made) != 0) return nullptr;
  std::shared_ptr<hwloc_topology> topology(made, ::hwloc_topology_destroy);
  const bool chosen = !synthetic || ::hwloc_topology_set_synthetic(made, synthetic->c_str()) == 0;
  return chosen && ::hwloc_topology_load(made) == 0 ? topology : nullptr;
}

/// The usual name of an object of hwloc that two CPUs share.
std::string name_of(hwloc_obj_t object) {
  switch (object->type) {
    case HWLOC_OBJ_CORE:
      return "core";
    case HWLOC_OBJ_GROUP:
      return "group";
    case HWLOC_OBJ_NUMANODE:
      return "NUMA node";
    case HWLOC_OBJ_PACKAGE:
      return "package";
    case HWLOC_OBJ_MACHINE:
      return "machine";
    default:
      return ::hwloc_obj_type_is_cache(object->type) != 0 ? text("L", object->attr->cache.depth)
                                                          : ::hwloc_obj_type_string(object->type);
  }
}

bool bind_thread_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  CPU_SET(cpu, &set);
  return ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set) == 0;
}

/// A flag with a pair of cache lines of its own, because processors fetch lines in pairs.
struct alignas(128) Flag {
  std::atomic<long> value{0};
};

constexpr long kStop = -1;

/// Two threads that pass a number back and forth.
class PingPong {
 public:
  PingPong(int first, int second) {
    echo_ = std::thread([this, second] { echo(second); });
    main_ = std::thread([this, first] { play(first); });
    main_.join();
    echo_.join();
  }
  const std::vector<double>& samples_ns() const { return samples_; }
  bool bound() const { return bound_; }

 private:
  void echo(int cpu) {
    if (!bind_thread_to(cpu)) bound_ = false;
    for (long last = 0;;) {
      const long seen = there_.value.load(std::memory_order_acquire);
      if (seen == last) continue;
      if (seen == kStop) return;
      last = seen;
      back_.value.store(seen, std::memory_order_release);
    }
  }
  void play(int cpu) {
    if (!bind_thread_to(cpu)) bound_ = false;
    const auto began = Clock::now();
    long number = 0;
    while (Clock::now() - began < kMeasureFor) {
      const auto start = Clock::now();
      for (int i = 0; i < kRoundTripsPerSample; ++i) {
        there_.value.store(++number, std::memory_order_release);
        for (unsigned spins = 1; back_.value.load(std::memory_order_acquire) != number; ++spins) {
          // Reading the clock takes about as long as a fast round trip.
          if (spins % 4096 == 0 && Clock::now() - began > kGiveUpAfter) return stop();
        }
      }
      samples_.push_back(std::chrono::duration<double, std::nano>(Clock::now() - start).count() /
                         kRoundTripsPerSample);
    }
    stop();
  }
  void stop() { there_.value.store(kStop, std::memory_order_release); }

  Flag there_, back_;
  std::vector<double> samples_;
  std::atomic<bool> bound_{true};
  std::thread echo_, main_;
};

}  // namespace

Fact<std::vector<SharedCache>> shared_caches(const std::vector<int>& allowed,
                                             const std::optional<std::string>& synthetic) {
  const auto machine = load_topology(synthetic);
  if (!machine) return unknown<std::vector<SharedCache>>("hwloc cannot read this machine");
  std::vector<SharedCache> shared;
  constexpr hwloc_obj_type_t kCaches[] = {HWLOC_OBJ_L1CACHE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE,
                                          HWLOC_OBJ_L4CACHE};
  for (const hwloc_obj_type_t type : kCaches) {
    for (hwloc_obj_t cache = nullptr;
         (cache = ::hwloc_get_next_obj_by_type(machine.get(), type, cache)) != nullptr;) {
      SharedCache found{.cache = name_of(cache), .cpus = {}};
      for (const int cpu : allowed) {
        if (::hwloc_bitmap_isset(cache->cpuset, static_cast<unsigned>(cpu)) != 0)
          found.cpus.push_back(cpu);
      }
      if (found.cpus.size() > 1) shared.push_back(std::move(found));
    }
  }
  return shared;
}

Fact<std::vector<CpuPair>> pairs_by_distance(const std::vector<int>& allowed,
                                             const std::optional<std::string>& synthetic) {
  const auto machine = load_topology(synthetic);
  if (!machine) return unknown<std::vector<CpuPair>>("hwloc cannot read this machine");
  struct Candidate {
    int depth;
    CpuPair pair;
  };
  std::vector<Candidate> candidates;
  // Machines are regular, so every kind of distance occurs from the first CPU.
  if (allowed.empty()) return std::vector<CpuPair>{};
  const hwloc_obj_t first =
      ::hwloc_get_pu_obj_by_os_index(machine.get(), static_cast<unsigned>(allowed.front()));
  for (std::size_t i = 1; i < allowed.size() && first != nullptr; ++i) {
    const hwloc_obj_t other =
        ::hwloc_get_pu_obj_by_os_index(machine.get(), static_cast<unsigned>(allowed[i]));
    if (other == nullptr) continue;
    const hwloc_obj_t common = ::hwloc_get_common_ancestor_obj(machine.get(), first, other);
    const bool known = std::any_of(candidates.begin(), candidates.end(),
                                   [&](const Candidate& c) { return c.depth == common->depth; });
    if (known) continue;
    candidates.push_back({common->depth,
                          {.first = allowed.front(),
                           .second = allowed[i],
                           .shares = name_of(common),
                           .round_trip_ns = {}}});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.depth > b.depth; });
  std::vector<CpuPair> pairs;
  for (Candidate& candidate : candidates) pairs.push_back(std::move(candidate.pair));
  return pairs;
}

Fact<double> flag_round_trip_ns(int first, int second) {
  const PingPong game(first, second);
  if (!game.bound()) return unknown<double>("the system refuses to bind threads to these CPUs");
  const std::vector<double>& samples = game.samples_ns();
  if (samples.empty()) return unknown<double>("the CPUs were busy with other work");
  return *std::min_element(samples.begin(), samples.end());
}

}  // namespace hvd::launcher::doctor
