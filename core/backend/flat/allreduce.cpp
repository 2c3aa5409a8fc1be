#include "backend/flat/allreduce_work.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "backend/backend.h"
#include "base/cache_line.h"
#include "kernels/kernels.h"

namespace hvd::flat {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

/// Small tensors: every rank sends its tensor to every other and reduces all of them, in rank
/// order. One message's latency.
class DirectAllreduce final : public FlatWork {
 public:
  DirectAllreduce(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                  std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(shared)), collective_(collective), in_(in), out_(out) {}

 protected:
  bool step() override {
    if (!started_) start();
    const auto ranks = static_cast<std::size_t>(context().size());
    for (const int slot : context().test()) {
      // Sends in the first half of the table, receives in the second.
      --(static_cast<std::size_t>(slot) < ranks ? sends_ : receives_);
    }
    // Not before the sends are done: `out` may be what they read.
    if (sends_ > 0 || receives_ > 0) return false;
    reduce(context().sources, out_.data(), collective_.count, collective_.dtype, collective_.op,
           collective_.scale);
    return true;
  }

 private:
  void start() {
    started_ = true;
    ChannelContext& shared = context();
    const auto ranks = static_cast<std::size_t>(shared.size());
    shared.requests().reset(2 * ranks);
    std::byte* const staging = shared.buffer().reserve(ranks > 1 ? ranks * in_.size() : 0);
    shared.sources[static_cast<std::size_t>(shared.rank())] = in_.data();
    // Each starts with its next neighbour, so that not all send to rank 0 first.
    for (int distance = 1; distance < shared.size(); ++distance) {
      const int peer = (shared.rank() + distance) % shared.size();
      const auto index = static_cast<std::size_t>(peer);
      std::byte* const place = staging + index * in_.size();
      shared.sources[index] = place;
      shared.receive(ranks + index, {place, in_.size()}, peer, kDirectKind);
      shared.send(index, in_, peer, kDirectKind);
      ++sends_;
      ++receives_;
    }
  }

  Collective collective_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;
  int sends_ = 0;
  int receives_ = 0;
  bool started_ = false;
};

/// Large tensors, in windows of one slice per rank. Rank j owns slice j: it receives the others'
/// slices, reduces them in rank order and sends the result to all.
///
///   per window, until both have come to an end; then the next one is taken:
///     [scatter: send slice j to owner j] --sent--> [gather: receive slice j from owner j]
///     [scatter: receive own slice from all] --all here--> [reduce] --> [gather: send it]
///
/// Slice j is received into `out` only after it was sent from `in`, as they may be the same memory.
/// A few windows are under way at a time, each with tags of its own, since their messages may
/// overtake one another.
class WindowedAllreduce final : public FlatWork {
 public:
  WindowedAllreduce(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out);

 protected:
  bool step() override;

 private:
  enum Phase : std::size_t { kScatterSend, kScatterReceive, kGatherSend, kGatherReceive, kPhases };
  struct Window {
    std::int64_t number = 0;
    int contributions = 0;  ///< still to come
    int messages = 0;       ///< of all phases, not completed yet
  };
  struct Slice {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  void start();
  void open_window(std::int64_t number);
  void completed(std::size_t slot);
  void reduce_own_slice(int index);

  Slice slice(const Window&, int owner) const noexcept;
  std::size_t slot(int window, Phase phase, int peer) const noexcept {
    return (static_cast<std::size_t>(window) * kPhases + phase) * static_cast<std::size_t>(ranks_) +
           static_cast<std::size_t>(peer);
  }
  std::byte* staged(int window, int peer) noexcept {
    return staging_ + static_cast<std::size_t>(window * ranks_ + peer) *
                          static_cast<std::size_t>(slice_elements_) * element_;
  }
  std::span<const std::byte> input(const Slice& part) const noexcept {
    return in_.subspan(static_cast<std::size_t>(part.first) * element_,
                       static_cast<std::size_t>(part.count) * element_);
  }
  std::span<std::byte> output(const Slice& part) const noexcept {
    return out_.subspan(static_cast<std::size_t>(part.first) * element_,
                        static_cast<std::size_t>(part.count) * element_);
  }

  const Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  const std::size_t element_;
  const int ranks_;
  const int own_;
  std::int64_t slice_elements_ = 0;
  std::byte* staging_ = nullptr;
  std::array<Window, kMaxWindows> windows_ = {};
  int windows_used_ = 0;
  std::int64_t window_count_ = 0;
  int open_ = 0;                   ///< windows under way
  std::size_t reduced_bytes_ = 0;  ///< read by reductions since it gave way
  bool started_ = false;
};

WindowedAllreduce::WindowedAllreduce(std::shared_ptr<ChannelContext> shared,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out)
    : FlatWork(std::move(shared)),
      collective_(collective),
      in_(in),
      out_(out),
      element_(size_of(collective.dtype)),
      ranks_(context().size()),
      own_(context().rank()) {
  constexpr std::int64_t kStagedBytes = 1 << 20;  // of one window: what the cache holds
  constexpr std::int64_t kSmallestSlice =
      32 * 1024;  // below it the messages cost more than the cache saves
  constexpr auto kLine = static_cast<std::int64_t>(kCacheLine);
  const auto element = static_cast<std::int64_t>(element_);
  const auto chunk = static_cast<std::int64_t>(context().tuning().chunk_bytes);
  const std::int64_t slice_bytes = std::min(
      chunk, std::max(kSmallestSlice, kStagedBytes / std::max(1, ranks_ - 1) / kLine * kLine));
  const std::int64_t limit = std::max<std::int64_t>(1, slice_bytes / element);
  // As many windows as that takes, all of about the same size.
  const std::int64_t windows = divide_up(collective_.count, limit * ranks_);
  const std::int64_t even = divide_up(divide_up(collective_.count, windows), ranks_);
  slice_elements_ = std::min(limit, round_up(even, kLine / element));
  window_count_ = divide_up(collective_.count, slice_elements_ * ranks_);
}

WindowedAllreduce::Slice WindowedAllreduce::slice(const Window& window, int owner) const noexcept {
  const std::int64_t first =
      std::min(collective_.count, (window.number * ranks_ + owner) * slice_elements_);
  const std::int64_t last = std::min(collective_.count, first + slice_elements_);
  return {first, last - first};
}

void WindowedAllreduce::start() {
  started_ = true;
  windows_used_ =
      static_cast<int>(std::min<std::int64_t>(context().tuning().windows, window_count_));
  context().requests().reset(static_cast<std::size_t>(windows_used_ * ranks_) * kPhases);
  staging_ = context().buffer().reserve(static_cast<std::size_t>(windows_used_ * ranks_) *
                                        static_cast<std::size_t>(slice_elements_) * element_);
  for (int number = 0; number < windows_used_; ++number) open_window(number);
}

void WindowedAllreduce::open_window(std::int64_t number) {
  // Not in whichever place is free: that would differ between ranks, and with it the tags.
  const auto index = static_cast<int>(number % windows_used_);
  Window& window = windows_[static_cast<std::size_t>(index)];
  window = {.number = number, .contributions = 0, .messages = 0};
  ++open_;
  const Slice mine = slice(window, own_);
  const auto mine_bytes = static_cast<std::size_t>(mine.count) * element_;
  for (int distance = 1; distance < ranks_; ++distance) {
    const int peer = (own_ + distance) % ranks_;
    if (mine.count > 0) {
      context().receive(slot(index, kScatterReceive, peer), {staged(index, peer), mine_bytes}, peer,
                        kScatterKind + index);
      ++window.contributions;
      window.messages += 2;  // this one, and the result to this peer
    }
    const Slice theirs = slice(window, peer);
    if (theirs.count > 0) {
      context().send(slot(index, kScatterSend, peer), input(theirs), peer, kScatterKind + index);
      window.messages += 2;  // this one, and the result from this peer
    }
  }
}

void WindowedAllreduce::reduce_own_slice(int index) {
  const Slice mine = slice(windows_[static_cast<std::size_t>(index)], own_);
  for (int rank = 0; rank < ranks_; ++rank) {
    context().sources[static_cast<std::size_t>(rank)] =
        rank == own_ ? input(mine).data() : staged(index, rank);
  }
  const std::span<std::byte> result = output(mine);
  reduce(context().sources, result.data(), mine.count, collective_.dtype, collective_.op,
         collective_.scale);
  reduced_bytes_ += static_cast<std::size_t>(ranks_) * result.size();
  for (int distance = 1; distance < ranks_; ++distance) {
    const int peer = (own_ + distance) % ranks_;
    context().send(slot(index, kGatherSend, peer), result, peer, kGatherKind + index);
  }
}

void WindowedAllreduce::completed(std::size_t finished) {
  const auto ranks = static_cast<std::size_t>(ranks_);
  const auto peer = static_cast<int>(finished % ranks);
  const auto phase = static_cast<Phase>(finished / ranks % kPhases);
  const auto index = static_cast<int>(finished / ranks / kPhases);
  Window& window = windows_[static_cast<std::size_t>(index)];
  --window.messages;
  switch (phase) {
    case kScatterSend:
      context().receive(slot(index, kGatherReceive, peer), output(slice(window, peer)), peer,
                        kGatherKind + index);
      break;
    case kScatterReceive:
      if (--window.contributions == 0) reduce_own_slice(index);
      break;
    default:
      break;
  }
  if (window.messages > 0) return;
  --open_;
  if (window.number + windows_used_ < window_count_) open_window(window.number + windows_used_);
}

bool WindowedAllreduce::step() {
  if (!started_) start();
  for (const int slot_index : context().test()) completed(static_cast<std::size_t>(slot_index));
  if (reduced_bytes_ >= kBytesPerCall) {
    reduced_bytes_ = 0;
    context().give_way();
  }
  return open_ == 0;
}

}  // namespace

std::unique_ptr<Work> make_allreduce_work(std::shared_ptr<ChannelContext> context,
                                          const Collective& collective,
                                          std::span<const std::byte> in, std::span<std::byte> out) {
  const auto peers = static_cast<std::size_t>(context->size()) - 1;
  const FlatTuning& tuning = context->tuning();
  const std::size_t direct_bytes =
      std::max(tuning.direct_bytes, peers == 1 ? tuning.direct_pair_bytes : 0);
  if (in.size() * peers <= direct_bytes) {
    return std::make_unique<DirectAllreduce>(std::move(context), collective, in, out);
  }
  return std::make_unique<WindowedAllreduce>(std::move(context), collective, in, out);
}

}  // namespace hvd::flat
