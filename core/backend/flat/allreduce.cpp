#include <algorithm>
#include <array>
#include <cstdint>

#include "backend/flat/flat_work.h"
#include "base/cache_line.h"
#include "kernels/kernels.h"

// Terms. A slice is the part of the tensor that one rank, its owner, reduces at a time
// (FlatTuning::slice_bytes). A window is one slice per rank, in rank order; the windows follow each
// other in the tensor.
//
//   tensor   | window 0                  | window 1                  | ...
//            | slice 0 | slice 1 | ...   | slice 0 | slice 1 | ...   |
//
// A small tensor is not cut: every rank sends it to every other rank, and each reduces all of them
// (DirectAllreduce). A large tensor is reduced window by window (WindowedAllreduce): the owners
// receive their slices from all ranks (scatter), reduce them in rank order, and send the results to
// all ranks (gather). Of two ranks, the owner reduces its slice while the other rank's arrives, if
// the carrier can pass on parts of a message (SliceReader).

namespace hvd::flat {
namespace {

/// Allreduce of small tensors in the time of one message.
class DirectAllreduce final : public FlatWork {
 public:
  DirectAllreduce(std::shared_ptr<FlatChannelState> state, const Collective& collective,
                  std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(state)), collective_(collective), in_(in), out_(out) {}

 protected:
  bool step() override {
    if (!started_) start();
    const auto ranks = static_cast<std::size_t>(channel().size());
    // The first half of the request table has the sends, the second half the receives.
    for (const int request : channel().test())
      --(static_cast<std::size_t>(request) < ranks ? sends_ : receives_);
    // The sends must be complete too: they may read `out`.
    if (sends_ > 0 || receives_ > 0) return false;
    reduce(channel().sources, out_.data(), collective_.count, collective_.dtype, collective_.op,
           collective_.scale);
    return true;
  }

 private:
  void start() {
    started_ = true;
    const int own = channel().rank();
    const int size = channel().size();
    const auto ranks = static_cast<std::size_t>(size);
    channel().requests().reset(2 * ranks);
    std::byte* const received = channel().buffer().reserve(size > 1 ? ranks * in_.size() : 0);
    channel().sources[static_cast<std::size_t>(own)] = in_.data();
    // Each rank starts with its next neighbour, so that not all ranks send to rank 0 first.
    for (int distance = 1; distance < size; ++distance) {
      const int peer = (own + distance) % size;
      const auto index = static_cast<std::size_t>(peer);
      std::byte* const from_peer = received + index * in_.size();
      channel().sources[index] = from_peer;
      channel().receive(ranks + index, {from_peer, in_.size()}, peer, kDirectKind);
      channel().send(index, in_, peer, kDirectKind);
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

/// Reduces a slice of this rank with the same slice of the only other rank while that arrives, so
/// that it is not stored first. Each element is reduced by itself, so the result has the same bits.
class SliceReader final : public message::PartReader {
 public:
  /// @param own 0 or 1, this rank's place in the order
  /// @param out may be the same memory as `in`
  void begin(const Collective& collective, int own, const std::byte* in, std::byte* out) {
    collective_ = &collective;
    own_ = own;
    in_ = in;
    out_ = out;
    split_bytes_ = 0;
    reduce_next(in, 0);  // throws for invalid parameters; read() must not throw
  }

  void read(std::span<const std::byte> part) noexcept override {
    const std::size_t element = size_of(collective_->dtype);
    if (split_bytes_ > 0) {
      part = part.subspan(keep(part, element - split_bytes_));
      if (split_bytes_ < element) return;
      reduce_next(split_.data(), 1);
      split_bytes_ = 0;
    }
    const std::size_t whole = part.size() / element;
    reduce_next(part.data(), whole);
    keep(part.subspan(whole * element), element);
  }

 private:
  /// Keeps the first bytes of a part for an element whose other bytes are in another part.
  std::size_t keep(std::span<const std::byte> part, std::size_t most) noexcept {
    const std::size_t kept = std::min(part.size(), most);
    std::copy_n(part.begin(), kept, split_.begin() + static_cast<std::ptrdiff_t>(split_bytes_));
    split_bytes_ += kept;
    return kept;
  }
  void reduce_next(const std::byte* theirs, std::size_t elements) {
    std::array<const std::byte*, 2> sources = {theirs, theirs};
    sources[static_cast<std::size_t>(own_)] = in_;
    reduce(sources, out_, static_cast<std::int64_t>(elements), collective_->dtype, collective_->op,
           collective_->scale);
    in_ += elements * size_of(collective_->dtype);
    out_ += elements * size_of(collective_->dtype);
  }

  const Collective* collective_ = nullptr;
  int own_ = 0;
  const std::byte* in_ = nullptr;  ///< the next element
  std::byte* out_ = nullptr;       ///< the next element
  std::array<std::byte, 8> split_ = {};
  std::size_t split_bytes_ = 0;
};

/// Allreduce of large tensors. The transfers of a window on the rank that owns slice j:
///
///   scatter: send slice i to its owner i      --sent--> gather: receive slice i from its owner
///   scatter: receive slice j from all ranks   --all received--> reduce --> gather: send it to all
///
/// The gather receives slice i into `out` only after the scatter has sent it from `in`, because
/// both may be the same memory. A few windows are under way at a time. Each has its own tags,
/// because messages of different windows may overtake each other.
class WindowedAllreduce final : public FlatWork {
 public:
  WindowedAllreduce(std::shared_ptr<FlatChannelState> state, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out);

 protected:
  bool step() override;

 private:
  enum SliceMessage : std::size_t {
    kScatterSend,
    kScatterReceive,
    kGatherSend,
    kGatherReceive,
    kTransfers
  };
  struct Window {
    std::int64_t number = 0;
    int missing_inputs = 0;         ///< slices that the scatter has not received yet
    int messages = 0;               ///< messages of all transfers that have not completed yet
    bool reduces_arrivals = false;  ///< the SliceReader reduces this rank's slice
  };
  struct Slice {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  void start();
  void open_window(std::int64_t number);
  void receive_input(int place, int peer, const Slice& mine);
  void on_completed(std::size_t request);
  void reduce_own_slice(int place);

  Slice slice(const Window&, int owner) const noexcept;
  /// The index of a transfer in the request table. @param place the window's index in windows_
  std::size_t request_of(int place, SliceMessage transfer, int peer) const noexcept {
    return (static_cast<std::size_t>(place) * kTransfers + transfer) *
               static_cast<std::size_t>(ranks_) +
           static_cast<std::size_t>(peer);
  }
  /// Memory for the slice that the scatter receives from a peer.
  std::byte* received(int place, int peer) noexcept {
    return received_ + static_cast<std::size_t>(place * ranks_ + peer) *
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
  const std::size_t element_;  ///< bytes
  const int ranks_;
  const int own_;
  std::int64_t slice_elements_ = 0;
  std::byte* received_ = nullptr;
  std::array<Window, kMaxWindows> windows_ = {};
  std::array<SliceReader, kMaxWindows> readers_ = {};  ///< like windows_; for two ranks
  int windows_used_ = 0;                               ///< how many entries of windows_ are used
  std::int64_t window_count_ = 0;                      ///< windows of the tensor
  int open_ = 0;                                       ///< windows under way
  std::size_t reduced_bytes_ = 0;  ///< read by reductions since the last give_way()
  bool started_ = false;
};

bool WindowedAllreduce::step() {
  if (!started_) start();
  for (const int request : channel().test()) on_completed(static_cast<std::size_t>(request));
  if (reduced_bytes_ >= kBytesPerCall) {
    reduced_bytes_ = 0;
    channel().give_way();
  }
  return open_ == 0;
}

void WindowedAllreduce::start() {
  started_ = true;
  windows_used_ =
      static_cast<int>(std::min<std::int64_t>(channel().tuning().windows, window_count_));
  channel().requests().reset(static_cast<std::size_t>(windows_used_ * ranks_) * kTransfers);
  for (int number = 0; number < windows_used_; ++number) open_window(number);
}

void WindowedAllreduce::open_window(std::int64_t number) {
  // The place follows from the number, so that the place and the tags are the same on all ranks.
  // The first free place could differ between ranks.
  const auto place = static_cast<int>(number % windows_used_);
  Window& window = windows_[static_cast<std::size_t>(place)];
  window = {.number = number};
  ++open_;
  const Slice mine = slice(window, own_);
  for (int distance = 1; distance < ranks_; ++distance) {
    const int peer = (own_ + distance) % ranks_;
    if (mine.count > 0) {
      receive_input(place, peer, mine);
      ++window.missing_inputs;
      window.messages += 2;  // this one, and the result to this peer
    }
    const Slice theirs = slice(window, peer);
    if (theirs.count > 0) {
      channel().send(request_of(place, kScatterSend, peer), input(theirs), peer,
                     kScatterKind + place);
      window.messages += 2;  // this one, and the result from this peer
    }
  }
}

void WindowedAllreduce::receive_input(int place, int peer, const Slice& mine) {
  const std::size_t request = request_of(place, kScatterReceive, peer);
  const std::size_t bytes = input(mine).size();
  if (ranks_ == 2) {
    SliceReader& reader = readers_[static_cast<std::size_t>(place)];
    reader.begin(collective_, own_, input(mine).data(), output(mine).data());
    bool& reduces = windows_[static_cast<std::size_t>(place)].reduces_arrivals;
    reduces = channel().receive_parts(request, reader, bytes, peer, kScatterKind + place);
    if (reduces) return;
  }
  if (received_ == nullptr) {
    received_ = channel().buffer().reserve(static_cast<std::size_t>(windows_used_ * ranks_) *
                                           static_cast<std::size_t>(slice_elements_) * element_);
  }
  channel().receive(request, {received(place, peer), bytes}, peer, kScatterKind + place);
}

void WindowedAllreduce::on_completed(std::size_t request) {
  const auto ranks = static_cast<std::size_t>(ranks_);
  const auto peer = static_cast<int>(request % ranks);
  const auto transfer = static_cast<SliceMessage>(request / ranks % kTransfers);
  const auto place = static_cast<int>(request / ranks / kTransfers);
  Window& window = windows_[static_cast<std::size_t>(place)];
  --window.messages;
  if (transfer == kScatterSend) {
    channel().receive(request_of(place, kGatherReceive, peer), output(slice(window, peer)), peer,
                      kGatherKind + place);
  } else if (transfer == kScatterReceive) {
    if (--window.missing_inputs == 0) reduce_own_slice(place);
  }
  if (window.messages > 0) return;
  --open_;
  if (window.number + windows_used_ < window_count_) open_window(window.number + windows_used_);
}

void WindowedAllreduce::reduce_own_slice(int place) {
  const Window& window = windows_[static_cast<std::size_t>(place)];
  const Slice mine = slice(window, own_);
  const std::span<std::byte> result = output(mine);
  if (!window.reduces_arrivals) {
    for (int rank = 0; rank < ranks_; ++rank) {
      channel().sources[static_cast<std::size_t>(rank)] =
          rank == own_ ? input(mine).data() : received(place, rank);
    }
    reduce(channel().sources, result.data(), mine.count, collective_.dtype, collective_.op,
           collective_.scale);
  }
  reduced_bytes_ += static_cast<std::size_t>(ranks_) * result.size();
  for (int distance = 1; distance < ranks_; ++distance) {
    const int peer = (own_ + distance) % ranks_;
    channel().send(request_of(place, kGatherSend, peer), result, peer, kGatherKind + place);
  }
}

WindowedAllreduce::Slice WindowedAllreduce::slice(const Window& window, int owner) const noexcept {
  const std::int64_t first =
      std::min(collective_.count, (window.number * ranks_ + owner) * slice_elements_);
  const std::int64_t last = std::min(collective_.count, first + slice_elements_);
  return {first, last - first};
}

std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

WindowedAllreduce::WindowedAllreduce(std::shared_ptr<FlatChannelState> state,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out)
    : FlatWork(std::move(state)),
      collective_(collective),
      in_(in),
      out_(out),
      element_(size_of(collective.dtype)),
      ranks_(channel().size()),
      own_(channel().rank()) {
  // A rank receives the slices of one window into at most this much memory, which fits into the
  // cache.
  constexpr std::int64_t kReceivedBytes = 1 << 20;
  // Below this size the additional messages cost more than the cache saves.
  constexpr std::int64_t kSmallestSlice = 32 * 1024;
  constexpr auto kLine = static_cast<std::int64_t>(kCacheLine);
  const auto element = static_cast<std::int64_t>(element_);
  const auto most = static_cast<std::int64_t>(channel().tuning().slice_bytes);
  const std::int64_t slice_bytes = std::min(
      most, std::max(kSmallestSlice, kReceivedBytes / std::max(1, ranks_ - 1) / kLine * kLine));
  const std::int64_t limit = std::max<std::int64_t>(1, slice_bytes / element);
  // Cuts the tensor into the number of windows that this limit requires, all of about the same
  // size.
  const std::int64_t windows = divide_up(collective_.count, limit * ranks_);
  const std::int64_t even = divide_up(divide_up(collective_.count, windows), ranks_);
  const std::int64_t elements_per_line = kLine / element;
  slice_elements_ = std::min(limit, divide_up(even, elements_per_line) * elements_per_line);
  window_count_ = divide_up(collective_.count, slice_elements_ * ranks_);
}

}  // namespace

std::unique_ptr<Work> make_allreduce(const std::shared_ptr<FlatChannelState>& state,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out) {
  const auto peers = static_cast<std::size_t>(state->size()) - 1;
  const FlatTuning& tuning = state->tuning();
  const std::size_t direct_bytes =
      std::max(tuning.direct_bytes, peers == 1 ? tuning.direct_pair_bytes : 0);
  if (in.size() * peers <= direct_bytes)
    return std::make_unique<DirectAllreduce>(state, collective, in, out);
  return std::make_unique<WindowedAllreduce>(state, collective, in, out);
}

}  // namespace hvd::flat
