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

/// A GPU that is simulated: queues whose work runs later, in an order drawn from a seed that
/// respects nothing but what the program asked for, and a record of who touched which memory when.
/// Whoever forgets to wait for an event computes garbage, and is reported.
namespace hvd::testing {

struct FakeGpuOptions {
  std::uint64_t seed = 1;
  /// Devices that a process sees.
  int devices = 1;
  /// Memory that the device's library has not allocated can be pinned.
  bool can_pin = true;
};

/// Calls of the Api, by one rank.
struct FakeGpuCounts {
  int synchronize = 0;
  int allocate = 0;
  /// Memory of the device: made and freed; pinned memory; and of these calls those by the thread
  /// that made the FakeGpu, which in a stepped job drives the engines.
  int made = 0;
  int freed = 0;
  int pinned_made = 0;
  int pinned_freed = 0;
  int made_or_freed_by_maker = 0;
  int launches = 0;
  int copies = 0;
  int copies_to_host = 0;  ///< of them
  int waits = 0;
  int records = 0;
};

/// Shared by the ranks of a test. Thread-safe.
///
/// Work runs when somebody asks whether an event has been reached, some at a time, and in
/// run_all(). Each queue has a vector clock; recording and waiting for events carry clocks from
/// queue to queue. Two accesses to the same memory, one of them writing, of which neither clock
/// knows the other, are a race: faults() has a line for each, whether or not this run computed
/// something wrong.
class FakeGpu {
 public:
  explicit FakeGpu(const FakeGpuOptions& = {});
  ~FakeGpu();

  /// A rank's Api. The object must outlive it.
  std::shared_ptr<device::Api> api(int rank);

  /// Runs until nothing can be run. True when the queues are empty.
  bool run_all();
  /// What was wrong: accesses without order, memory that is not the device's, calls without the
  /// device made current.
  std::vector<std::string> faults() const;
  /// The same, and forgets them.
  std::vector<std::string> take_faults();
  FakeGpuCounts counts(int rank) const;
  /// The rank's next so many calls find no memory on the device; -1: all.
  void run_out_of_memory(int rank, int times);
  /// How often memory was pinned that somebody else has allocated.
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
    /// May run now; it is at the head of its queue. Empty: always.
    std::function<bool()> ready = {};
    std::function<void()> run = {};
    bool never_ends = false;
  };
  void enqueue(device::Stream, Item);
  /// As enqueue(), and runs everything up to the item, with what that waits for in other queues and
  /// nothing else: whoever computes in place of the device may then touch the memory.
  void run_through(device::Stream, Item);
  /// Between the two the stream records a graph, or so it says: whatever any rank but `by` puts
  /// there is a fault.
  void begin_capture(device::Stream, int by);
  void end_capture(device::Stream);
  std::recursive_mutex& mutex() { return mutex_; }
  /// Nothing behind it in the stream runs any more, as behind a kernel in an endless loop: what
  /// waits for the rank's device, as freeing memory does, would wait forever.
  void hang(device::Stream);
  /// Runs what can be run. True when nothing is left in the queues that this rank has made.
  bool run_until_idle(int rank);

  /// Memory whose first MiB is garbage, for a test's tensors.
  std::byte* allocate(std::size_t bytes);
  /// Memory that is given to somebody else: accesses whose end a thread of the host has seen are
  /// over, and need no further order.
  void forget_seen(const std::byte* memory);
  /// Gives it back; what had to do with it is forgotten. @pre the device is done with it
  void release(std::byte*);
  /// One more line of faults(), from somebody else who is simulated. Under mutex().
  void fault(const std::string&);

 private:
  friend class FakeApi;
  using Clock = std::map<int, std::uint64_t>;  // by queue: how much of it has been seen
  struct QueuedItem {
    Item item;
    bool is_wait = false;
    int event = -1;                // waited for or recorded; -1: neither
    std::uint64_t generation = 0;  // of the event
  };
  struct Queue {
    std::deque<QueuedItem> items;
    int owner = -1;        // the rank that made it
    int captured_by = -1;  // a rank; -1: it is not
    Clock clock;           // of what was put in so far
  };
  struct EventState {
    std::uint64_t recorded = 0;
    /// Recorded and not reached. More than one when an event is used again before the device has
    /// come to where it was.
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

  int queue_of(device::Stream) const;
  int event_index_of(device::EventHandle) const;
  void check_not_captured(device::Stream, int rank, const char* call);
  void check_not_hanging(int rank, const char* call);
  std::byte* allocate_locked(std::size_t bytes, bool pinned);
  void pin_locked(std::byte*, std::size_t bytes);
  void release_locked(std::byte*, bool pinned);
  void enqueue_locked(int queue, QueuedItem);
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
  std::map<int, int> refusals_;  // by rank: how many allocations are still to fail
  const std::thread::id maker_ = std::this_thread::get_id();
  std::map<int, Clock> host_;  // by rank: what it has seen reached
  int pinned_ = 0;
};

/// What the kernels do, in C++: the same tiles and the same code per element, thread by thread.
void run_copy_on_host(const device::CopyLaunch&, std::uint32_t threads = 512);

}  // namespace hvd::testing
