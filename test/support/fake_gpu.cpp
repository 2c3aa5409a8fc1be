#include "support/fake_gpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/expect.h"
#include "device/copy_loop.h"
#include "hvd/error.h"

namespace hvd::testing {
namespace {

constexpr int kGarbage = 0xcd;
/// Only this much of a block is filled with garbage, so that its other pages are not allocated
/// until they are used.
constexpr std::size_t kMaxGarbage = 1 << 20;
constexpr std::size_t kMaxFaults = 20;

void* handle_of(int index) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(index + 1));
}
int index_of(void* handle) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1;
}

bool overlap(const FakeGpu::Range& a, const FakeGpu::Range& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

thread_local int current_device = -1;

}  // namespace

class FakeApi final : public device::Api {
 public:
  FakeApi(FakeGpu& gpu, int rank) : gpu_(gpu), rank_(rank) {}

  int device_count() noexcept override { return gpu_.options_.devices; }
  device::DeviceInfo info(int device) override {
    return {"fake", "0000:0" + std::to_string(device) + ":00.0", 132, 9, 0, std::size_t{1} << 37};
  }

  void enter(int device) override {
    const std::lock_guard lock(gpu_.mutex_);
    if (device < 0 || device >= gpu_.options_.devices)
      throw Error("fake: there is no device " + std::to_string(device));
    stack().push_back(std::exchange(current_device, device));
  }
  void leave() noexcept override {
    current_device = stack().back();
    stack().pop_back();
  }

  device::Stream create_stream() override {
    const auto lock = begin("create_stream");
    gpu_.queues_.push_back(std::make_unique<FakeGpu::Queue>());
    gpu_.queues_.back()->owner = rank_;
    return {handle_of(static_cast<int>(gpu_.queues_.size()) - 1)};
  }
  void destroy_stream(device::Stream) noexcept override {
    const auto lock = begin("destroy_stream");
  }
  device::EventHandle create_event() override {
    const auto lock = begin("create_event");
    gpu_.events_.emplace_back();
    return {handle_of(static_cast<int>(gpu_.events_.size()) - 1)};
  }
  void destroy_event(device::EventHandle event) noexcept override {
    const auto lock = begin("destroy_event");
    gpu_.state_of(event).alive = false;
  }
  void record(device::EventHandle event, device::Stream stream) override {
    const auto lock = begin("record");
    gpu_.check_not_captured(stream, rank_, "record");
    ++counts().records;
    FakeGpu::Queue& queue = gpu_.queue_of(stream);
    FakeGpu::EventState& state = gpu_.state_of(event);
    ++queue.clock[gpu_.number_of(stream)];
    state.clock = queue.clock;
    state.ahead.insert(++state.recorded);
    queue.items.push_back({{"record"}, false, index_of(event.handle), state.recorded});
  }
  void wait(device::Stream stream, device::EventHandle event) override {
    const auto lock = begin("wait");
    gpu_.check_not_captured(stream, rank_, "wait");
    ++counts().waits;
    FakeGpu::Queue& queue = gpu_.queue_of(stream);
    const FakeGpu::EventState& state = gpu_.state_of(event);
    advance(queue.clock, state.clock);
    queue.items.push_back({{"wait"}, true, index_of(event.handle), state.recorded});
  }
  bool reached(device::EventHandle event) override {
    const auto lock = begin("reached");
    gpu_.run_some(static_cast<int>(gpu_.random_() % 4));
    const FakeGpu::EventState& state = gpu_.state_of(event);
    if (state.ahead.count(state.recorded) > 0) return false;
    advance(gpu_.host_[rank_], state.clock);
    return true;
  }
  bool capturing(device::Stream stream) override {
    const auto lock = begin("capturing");
    return gpu_.queue_of(stream).captured_by >= 0;
  }
  void synchronize(device::Stream stream) override {
    const auto lock = begin("synchronize");
    gpu_.check_not_hanging(rank_, "synchronize");
    ++counts().synchronize;
    while (!gpu_.queue_of(stream).items.empty() && gpu_.run_some(1)) {
    }
  }

  std::byte* allocate(std::size_t bytes) override {
    const auto lock = begin("allocate");
    ++counts().allocate;
    int& refusals = gpu_.refusals_[rank_];
    if (refusals != 0) {
      if (refusals > 0) --refusals;
      throw Error("fake: cudaMalloc failed: out of memory");
    }
    ++counts().made;
    count_caller();
    return gpu_.allocate_locked(bytes, false);
  }
  void release(std::byte* memory) noexcept override {
    const auto lock = begin("release");
    gpu_.check_not_hanging(rank_, "release");
    ++counts().freed;
    count_caller();
    gpu_.release_locked(memory, false);
  }
  std::byte* allocate_pinned(std::size_t bytes) override {
    const auto lock = begin("allocate_pinned");
    ++counts().allocate;
    ++counts().pinned_made;
    count_caller();
    return gpu_.allocate_locked(bytes, true);
  }
  void release_pinned(std::byte* memory) noexcept override {
    const auto lock = begin("release_pinned");
    ++counts().pinned_freed;
    count_caller();
    gpu_.check_not_hanging(rank_, "release_pinned");
    gpu_.release_locked(memory, true);
  }

  void pin(std::byte* memory, std::size_t bytes) override {
    const auto lock = begin("pin");
    ++counts().allocate;
    ++counts().pinned_made;
    count_caller();
    gpu_.pin_locked(memory, bytes);
  }
  void unpin(std::byte* memory) noexcept override {
    const auto lock = begin("unpin");
    ++counts().pinned_freed;
    count_caller();
    gpu_.check_not_hanging(rank_, "unpin");
    gpu_.release_locked(memory, true);
  }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes, device::Direction direction,
            device::Stream stream) override {
    const auto lock = begin("copy");
    gpu_.check_not_captured(stream, rank_, "copy");
    ++counts().copies;
    counts().copies_to_host += direction == device::Direction::kToHost ? 1 : 0;
    enqueue(stream, {"copy", {{from, bytes, false}, {to, bytes, true}}, {}, [to, from, bytes] {
                       std::memcpy(to, from, bytes);
                     }});
  }
  void run(const device::CopyLaunch& launch, device::Stream stream) override {
    const auto lock = begin("run");
    gpu_.check_not_captured(stream, rank_, "run");
    ++counts().launches;
    FakeGpu::Item item{"batched copy", {}, {}, [launch] { run_copy_on_host(launch, 7); }};
    for (std::uint32_t i = 0; i < launch.table.tiles; ++i) {
      const device::Tile tile = device::tile_of(launch.table, i);
      add(item.ranges, {tile.tensor, tile.count * size_of(launch.form.tensor), !launch.to_buffer});
      add(item.ranges, {launch.buffer + tile.offset, tile.count * size_of(launch.form.buffer),
                        launch.to_buffer});
    }
    enqueue(stream, std::move(item));
  }
  void fill(std::byte* to, std::size_t count, std::size_t element_bytes, std::uint64_t pattern,
            device::Stream stream) override {
    HVD_EXPECT(reinterpret_cast<std::uintptr_t>(to) % element_bytes == 0, "aligned to an element");
    const auto lock = begin("fill");
    gpu_.check_not_captured(stream, rank_, "fill");
    ++counts().launches;
    gpu_.enqueue(stream, {"fill", {{to, count * element_bytes, true}}, {}, [=] {
                            for (std::size_t i = 0; i < count; ++i)
                              std::memcpy(to + i * element_bytes, &pattern, element_bytes);
                          }});
  }

 private:
  static void advance(FakeGpu::Clock& clock, const FakeGpu::Clock& seen) {
    for (const auto& [queue, at] : seen) clock[queue] = std::max(clock[queue], at);
  }
  // Work whose end the host has seen is ordered before work that it enqueues now.
  void enqueue(device::Stream stream, FakeGpu::Item item) {
    advance(gpu_.queue_of(stream).clock, gpu_.host_[rank_]);
    gpu_.enqueue(stream, std::move(item));
  }
  // Tiles of a tensor follow each other, two entries apart.
  static void add(std::vector<FakeGpu::Range>& ranges, const FakeGpu::Range& range) {
    for (std::size_t back = 1; back <= 2 && back < ranges.size(); ++back) {
      FakeGpu::Range& before = ranges[ranges.size() - back];
      if (before.writes != range.writes || before.begin + before.bytes != range.begin) continue;
      before.bytes += range.bytes;
      return;
    }
    ranges.push_back(range);
  }
  static std::vector<int>& stack() {
    static thread_local std::vector<int> entered;
    return entered;
  }
  std::unique_lock<std::recursive_mutex> begin(const char* call) {
    std::unique_lock lock(gpu_.mutex_);
    if (current_device < 0)
      gpu_.fault("rank " + std::to_string(rank_) + ": " + call +
                 "() without the device made current");
    return lock;
  }
  FakeGpuCounts& counts() { return gpu_.counts_[rank_]; }
  void count_caller() {
    if (std::this_thread::get_id() == gpu_.maker_) ++counts().made_or_freed_by_maker;
  }

  FakeGpu& gpu_;
  const int rank_;
};

void FakeGpu::run_out_of_memory(int rank, int times) {
  const std::lock_guard lock(mutex_);
  refusals_[rank] = times;
}

FakeGpu::FakeGpu(const FakeGpuOptions& options) : options_(options), random_(options.seed) {}
FakeGpu::~FakeGpu() = default;

std::shared_ptr<device::Api> FakeGpu::api(int rank) {
  return std::make_shared<FakeApi>(*this, rank);
}

int FakeGpu::number_of(device::Stream stream) const {
  const int index = index_of(stream.handle);
  if (index < 0 || index >= static_cast<int>(queues_.size())) throw Error("fake: not a stream");
  return index;
}

FakeGpu::Queue& FakeGpu::queue_of(device::Stream stream) {
  return *queues_[static_cast<std::size_t>(number_of(stream))];
}

FakeGpu::EventState& FakeGpu::state_of(device::EventHandle event) {
  const auto index = static_cast<std::size_t>(index_of(event.handle));
  if (index >= events_.size() || !events_[index].alive) throw Error("fake: not an event");
  return events_[index];
}

std::byte* FakeGpu::allocate_locked(std::size_t bytes, bool pinned) {
  constexpr std::size_t kAlignment = 256;
  auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes + 2 * kAlignment);
  std::memset(memory.get(), kGarbage, std::min(bytes + 2 * kAlignment, kMaxGarbage));
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  std::byte* const aligned = memory.get() + (kAlignment - address % kAlignment) % kAlignment;
  blocks_[aligned] = {std::move(memory), bytes, pinned, false};
  return aligned;
}

void FakeGpu::pin_locked(std::byte* memory, std::size_t bytes) {
  if (!options_.can_pin) throw Error("fake: cudaHostRegister failed: operation not supported");
  if (reinterpret_cast<std::uintptr_t>(memory) % 4096 != 0 || bytes % 4096 != 0)
    fault("memory was pinned that is not whole pages");
  if (const auto known = blocks_.find(memory); known != blocks_.end() && !known->second.freed)
    fault("memory was pinned twice");
  blocks_[memory] = {nullptr, bytes, true, false};
  ++pinned_;
}

std::byte* FakeGpu::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return allocate_locked(bytes, false);
}

void FakeGpu::release(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  release_locked(memory, false);
  const Range all{memory, blocks_[memory].bytes, true};
  std::erase_if(accesses_, [&](const Access& access) { return overlap(access.range, all); });
  blocks_.erase(memory);
}

// Freed memory stays mapped, and using it is a fault.
void FakeGpu::release_locked(std::byte* memory, bool pinned) {
  const auto block = blocks_.find(memory);
  if (block == blocks_.end() || block->second.freed || block->second.pinned != pinned)
    return fault("memory was freed that was not allocated so");
  block->second.freed = true;
  for (const auto& queue : queues_) {
    for (const QueuedItem& waiting : queue->items) {
      for (const Range& range : waiting.item.ranges) {
        if (overlap(range, {memory, block->second.bytes, true}))
          fault("memory was freed that '" + waiting.item.name + "' will use");
      }
    }
  }
}

void FakeGpu::fault(const std::string& text) {
  if (faults_.size() < kMaxFaults) faults_.push_back(text);
}

void FakeGpu::enqueue(device::Stream stream, Item item) {
  const std::lock_guard lock(mutex_);
  check_memory(item);
  check_ranges(item, number_of(stream), queue_of(stream).clock);
  queue_of(stream).items.push_back({std::move(item)});
}

void FakeGpu::check_memory(const Item& item) {
  for (const Range& range : item.ranges) {
    if (range.bytes == 0) continue;
    auto block = blocks_.upper_bound(range.begin);
    const bool known = block != blocks_.begin() &&
                       (--block, range.begin + range.bytes <= block->first + block->second.bytes);
    if (!known) fault("'" + item.name + "' uses memory that is not the device's");
    if (known && block->second.freed) fault("'" + item.name + "' uses memory that was freed");
  }
}

void FakeGpu::check_ranges(const Item& item, int queue, Clock& clock) {
  const std::uint64_t now = ++clock[queue];
  for (const Range& range : item.ranges) {
    for (const Access& access : accesses_) {
      if (access.queue == queue || (!access.range.writes && !range.writes) ||
          !overlap(access.range, range))
        continue;
      if (clock[access.queue] < access.at) {
        fault("'" + item.name + "' on queue " + std::to_string(queue) +
              (range.writes ? " writes" : " reads") + " what '" + access.name + "' on queue " +
              std::to_string(access.queue) + (access.range.writes ? " writes" : " reads") +
              ", and neither waits for the other");
      }
    }
  }
  // Forget the accesses that this one covers and is ordered behind.
  std::erase_if(accesses_, [&](const Access& access) {
    return access.queue == queue &&
           std::any_of(item.ranges.begin(), item.ranges.end(), [&](const Range& range) {
             return range.begin <= access.range.begin &&
                    access.range.begin + access.range.bytes <= range.begin + range.bytes &&
                    (range.writes || !access.range.writes);
           });
  });
  for (const Range& range : item.ranges) {
    if (range.bytes > 0) accesses_.push_back({range, queue, now, item.name});
  }
}

bool FakeGpu::run_head(Queue& queue) {
  if (queue.items.empty()) return false;
  QueuedItem& head = queue.items.front();
  if (head.event >= 0) {
    EventState& event = events_[static_cast<std::size_t>(head.event)];
    if (head.is_wait && event.ahead.count(head.generation) > 0) return false;
    if (!head.is_wait) event.ahead.erase(head.generation);
  } else if (head.item.ready && !head.item.ready()) {
    return false;
  }
  const QueuedItem taken = std::move(head);
  queue.items.pop_front();
  if (taken.item.run) taken.item.run();
  return true;
}

// Runs at most `most` items, from random queues. Returns false if no item could run.
bool FakeGpu::run_some(int most) {
  bool moved = false;
  for (int done = 0; done < most; ++done) {
    std::vector<std::size_t> order(queues_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    const bool ran = std::any_of(order.begin(), order.end(),
                                 [this](std::size_t queue) { return run_head(*queues_[queue]); });
    if (!ran) return moved;
    moved = true;
  }
  return moved;
}

void FakeGpu::run_through(device::Stream stream, Item item) {
  const std::lock_guard lock(mutex_);
  enqueue(stream, std::move(item));
  run_queue(queue_of(stream));
}

void FakeGpu::hang(device::Stream stream) {
  Item item;
  item.name = "an endless loop";
  item.ready = [] { return false; };
  item.never_ends = true;
  enqueue(stream, std::move(item));
}

bool FakeGpu::run_until_idle(int rank) {
  const std::lock_guard lock(mutex_);
  const auto idle = [rank](const auto& queue) {
    return queue->owner != rank || queue->items.empty();
  };
  while (!std::all_of(queues_.begin(), queues_.end(), idle)) {
    if (!run_some(1)) return false;
  }
  return true;
}

void FakeGpu::begin_capture(device::Stream stream, int by) {
  const std::lock_guard lock(mutex_);
  queue_of(stream).captured_by = by;
}

void FakeGpu::end_capture(device::Stream stream) { begin_capture(stream, -1); }

void FakeGpu::check_not_captured(device::Stream stream, int rank, const char* call) {
  const int by = queue_of(stream).captured_by;
  if (by >= 0 && by != rank)
    fault(std::string(call) + " on a stream that is being captured into a graph");
}

void FakeGpu::check_not_hanging(int rank, const char* call) {
  const bool hangs = std::any_of(queues_.begin(), queues_.end(), [rank](const auto& queue) {
    return queue->owner == rank &&
           std::any_of(queue->items.begin(), queue->items.end(),
                       [](const QueuedItem& item) { return item.item.never_ends; });
  });
  if (hangs)
    fault("rank " + std::to_string(rank) + ": " + call + "() waits for a device that hangs");
}

// Runs the queue until the event's record() has run, or to its end. Events are recorded before any
// queue waits for them, so the record is always reached.
void FakeGpu::run_queue(Queue& queue, int until_event, std::uint64_t generation) {
  while (!queue.items.empty()) {
    if (until_event >= 0 &&
        events_[static_cast<std::size_t>(until_event)].ahead.count(generation) == 0)
      return;
    if (run_head(queue)) continue;
    const QueuedItem& head = queue.items.front();
    const auto holds = [&](const std::unique_ptr<Queue>& other) {
      return std::any_of(other->items.begin(), other->items.end(), [&](const QueuedItem& item) {
        return !item.is_wait && item.event == head.event && item.generation == head.generation;
      });
    };
    const auto other = std::find_if(queues_.begin(), queues_.end(), holds);
    if (head.event < 0 || other == queues_.end())
      throw Error("fake: '" + head.item.name + "' waits for an event that is never recorded");
    const auto [event, wanted] = std::pair(head.event, head.generation);
    run_queue(**other, event, wanted);
  }
}

void FakeGpu::forget_seen(const std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const Range all{memory, blocks_.at(memory).bytes, true};
  std::erase_if(accesses_, [&](const Access& access) {
    return overlap(access.range, all) &&
           std::any_of(host_.begin(), host_.end(), [&](const auto& host) {
             const auto seen = host.second.find(access.queue);
             return seen != host.second.end() && seen->second >= access.at;
           });
  });
}

bool FakeGpu::run_all() {
  const std::lock_guard lock(mutex_);
  while (run_some(1)) {
  }
  return std::all_of(queues_.begin(), queues_.end(),
                     [](const auto& queue) { return queue->items.empty(); });
}

std::vector<std::string> FakeGpu::faults() const {
  const std::lock_guard lock(mutex_);
  return faults_;
}

std::vector<std::string> FakeGpu::drain_faults() {
  const std::lock_guard lock(mutex_);
  return std::exchange(faults_, {});
}

int FakeGpu::pinned() const {
  const std::lock_guard lock(mutex_);
  return pinned_;
}

FakeGpuCounts FakeGpu::counts(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(rank);
  return found == counts_.end() ? FakeGpuCounts{} : found->second;
}

}  // namespace hvd::testing
