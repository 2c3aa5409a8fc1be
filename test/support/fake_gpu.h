#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/api.h"

/// A simulated GPU. Work in its queues runs later, in a random order that respects only the
/// program's events, and every access to memory is recorded. Code that forgets to wait for an event
/// computes garbage, and the race is reported.
namespace hvd::testing {

struct FakeGpuOptions {
  std::uint64_t seed = 1;
  /// Devices that a process sees.
  int devices = 1;
  /// Whether memory that the device's library has not allocated can be pinned.
  bool can_pin = true;
};

/// Calls of the Api, by one rank.
struct FakeGpuCounts {
  int synchronize = 0;
  int allocate = 0;
  /// Allocations and releases of device memory and of pinned memory; and how many of these calls
  /// were made by the thread that created the FakeGpu, which drives the engines of a stepped job.
  int made = 0;
  int freed = 0;
  int pinned_made = 0;
  int pinned_freed = 0;
  int made_or_freed_by_maker = 0;
  int launches = 0;
  int copies = 0;
  int copies_to_host = 0;  ///< included in copies
  int waits = 0;
  int records = 0;
};

/// Shared by the ranks of a test. Thread-safe.
///
/// Some work runs at each query of an event, and all of it in run_all(). Each queue has a vector
/// clock, and recording and waiting for events carries clocks from queue to queue. Two accesses to
/// the same memory are a race if one of them writes and no clock orders them. faults() has a line
/// for each race, whether or not this run computed a wrong result.
class FakeGpu {
 public:
  explicit FakeGpu(const FakeGpuOptions& = {});
  ~FakeGpu();

  /// A rank's Api. The object must outlive it.
  std::shared_ptr<device::Api> api(int rank);

  /// Runs all work that can run. @return whether the queues are empty
  bool run_all();
  /// The errors found: races, accesses to memory that is not the device's, calls while no device
  /// was current.
  std::vector<std::string> faults() const;
  /// Returns the faults and clears them.
  std::vector<std::string> drain_faults();
  FakeGpuCounts counts(int rank) const;
  /// The next `times` allocations of the rank fail for lack of device memory; -1: all.
  void run_out_of_memory(int rank, int times);
  /// How often Api::pin() was called.
  int pinned() const;

  // For the fake of NCCL.
  struct Range {
    const std::byte* begin = nullptr;
    std::size_t bytes = 0;
    bool writes = false;
  };
  struct Item {
    std::string name = {};
    std::vector<Range> ranges = {};
    /// Whether the item, at the head of its queue, may run now. Empty: always.
    std::function<bool()> ready = {};
    std::function<void()> run = {};
    bool never_ends = false;
  };
  void enqueue(device::Stream, Item);
  /// Enqueues the item, then runs it, all work ahead of it and all work that these wait for in
  /// other queues. The caller may then access the memory in place of the device.
  void run_through(device::Stream, Item);
  /// Between the two calls the stream counts as being captured into a graph: work that any rank but
  /// `by` enqueues there is a fault.
  void begin_capture(device::Stream, int by);
  void end_capture(device::Stream);
  std::recursive_mutex& mutex() { return mutex_; }
  /// Enqueues an item that never ends, like a kernel in an endless loop. Calls that wait for the
  /// rank's device, such as freeing memory, would wait forever.
  void hang(device::Stream);
  /// Runs all work that can run. @return whether the queues that this rank created are empty
  bool run_until_idle(int rank);

  /// Device memory for a test's tensors. Its first MiB contains garbage.
  std::byte* allocate(std::size_t bytes);
  /// For memory that gets another owner: forgets the accesses whose end the host has seen, so that
  /// later accesses need not be ordered behind them.
  void forget_seen(const std::byte* memory);
  /// Frees the memory and forgets the accesses to it. @pre the device has finished with it
  void release(std::byte*);
  /// Adds a line to faults(), for other simulated libraries. Requires mutex().
  void fault(const std::string&);

 private:
  friend class FakeApi;
  using Clock =
      std::map<int, std::uint64_t>;  // by queue: number of its items that are ordered before
  struct QueuedItem {
    Item item;
    bool is_wait = false;
    int event = -1;                // waited for or recorded; -1: neither
    std::uint64_t generation = 0;  // of the event
  };
  struct Queue {
    std::deque<QueuedItem> items;
    int owner = -1;        // the rank that created it
    int captured_by = -1;  // the rank that captures it; -1: not captured
    Clock clock;           // of the items enqueued so far
  };
  struct EventState {
    std::uint64_t recorded = 0;
    /// Generations that are recorded and not reached. Several if the event is recorded again before
    /// the device has reached the earlier position.
    std::set<std::uint64_t> ahead;
    Clock clock;
    bool alive = true;
  };
  struct Access {
    Range range;
    int queue;
    std::uint64_t at;
    std::string name;
  };
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
    bool pinned;
    bool freed;
  };

  int number_of(device::Stream) const;
  Queue& queue_of(device::Stream);
  EventState& state_of(device::EventHandle);
  void check_not_captured(device::Stream, int rank, const char* call);
  void check_not_hanging(int rank, const char* call);
  std::byte* allocate_locked(std::size_t bytes, bool pinned);
  void pin_locked(std::byte*, std::size_t bytes);
  void release_locked(std::byte*, bool pinned);
  void check_ranges(const Item&, int queue, Clock&);
  void check_memory(const Item&);
  bool run_some(int most);
  bool run_head(Queue&);
  void run_queue(Queue&, int until_event = -1, std::uint64_t generation = 0);

  const FakeGpuOptions options_;
  mutable std::recursive_mutex mutex_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<EventState> events_;
  std::map<const std::byte*, Block> blocks_;
  std::vector<Access> accesses_;
  std::vector<std::string> faults_;
  std::map<int, FakeGpuCounts> counts_;
  std::map<int, int> refusals_;  // by rank: number of allocations that will fail
  const std::thread::id maker_ = std::this_thread::get_id();
  std::map<int, Clock> host_;  // by rank: the work whose end its host has seen
  int pinned_ = 0;
};

/// Executes a launch of the copy kernels in C++, thread by thread, with the same tiles and the same
/// code per element.
void run_copy_on_host(const device::CopyLaunch&, std::uint32_t threads = 512);

}  // namespace hvd::testing
