#include "backend/flat/chunked_works.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/backend.h"
#include "backend/flat/chunked_transfers.h"
#include "kernels/kernels.h"

namespace hvd::flat {
namespace {

/// A copy within this process, done in pieces beside the messages.
class LocalCopy {
 public:
  LocalCopy() = default;
  LocalCopy(std::span<const std::byte> from, std::byte* to) noexcept : from_(from), to_(to) {
    if (from.data() == to) from_ = {};
  }
  /// True once all is copied.
  bool step() noexcept {
    const std::size_t bytes = std::min(kBytesPerCall, from_.size());
    if (bytes > 0) std::memcpy(to_, from_.data(), bytes);
    from_ = from_.subspan(bytes);
    to_ += bytes;
    return from_.empty();
  }

 private:
  std::span<const std::byte> from_;
  std::byte* to_ = nullptr;
};

bool copy_in_pieces(LocalCopy& copy, ChannelContext& context) noexcept {
  const bool done = copy.step();
  if (!done) context.give_way();
  return done;
}

/// Blocks of different sizes, one per rank, one after the other.
class Blocks {
 public:
  Blocks(std::span<const std::int64_t> counts, std::size_t element)
      : counts_(counts), element_(element) {}

  template <typename Byte>
  std::span<Byte> of(std::span<Byte> all, int rank) const {
    std::size_t first = 0;
    for (int before = 0; before < rank; ++before) first += bytes(before);
    return all.subspan(first, bytes(rank));
  }

 private:
  std::size_t bytes(int rank) const {
    return static_cast<std::size_t>(counts_[static_cast<std::size_t>(rank)]) * element_;
  }

  std::span<const std::int64_t> counts_;
  std::size_t element_;
};

/// Allgather and alltoall: a block to each peer, a block from each, and one's own.
class ExchangeWork final : public FlatWork {
 public:
  using FlatWork::context;
  explicit ExchangeWork(std::shared_ptr<ChannelContext> shared)
      : FlatWork(std::move(shared)), transfers_(context()) {}

  void add(int peer, std::span<const std::byte> to_peer, std::span<std::byte> from_peer) {
    if (peer == context().rank()) {
      copy_ = LocalCopy(to_peer, from_peer.data());
      return;
    }
    transfers_.add_receive(peer, from_peer);
    transfers_.add_send(peer, to_peer);
  }

 protected:
  bool step() override {
    if (!std::exchange(started_, true)) transfers_.start();
    const bool exchanged = transfers_.step();
    return copy_in_pieces(copy_, context()) && exchanged;
  }

 private:
  ChunkedTransfers transfers_;
  LocalCopy copy_;
  bool started_ = false;
};

/// A binomial tree, in which every rank passes on what has arrived so far.
class BroadcastWork final : public FlatWork {
 public:
  BroadcastWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(shared)), transfers_(context()) {
    const int ranks = context().size();
    // Ranks as seen from the root.
    const int own = (context().rank() - collective.root + ranks) % ranks;
    const auto absolute = [&](int relative) { return (relative + collective.root) % ranks; };
    const bool is_root = own == 0;
    if (is_root) copy_ = LocalCopy(in, out.data());
    int bit = 1;
    for (; bit < ranks && (own & bit) == 0; bit <<= 1) {
    }
    if (!is_root) parent_ = transfers_.add_receive(absolute(own - bit), out);
    for (bit >>= 1; bit > 0; bit >>= 1) {
      if (own + bit >= ranks) continue;
      children_.push_back(
          transfers_.add_send(absolute(own + bit), is_root ? in : std::span<const std::byte>(out)));
      if (!is_root) transfers_.set_limit(children_.back(), 0);
    }
  }

 protected:
  bool step() override {
    if (!std::exchange(started_, true)) transfers_.start();
    const bool done = transfers_.step();
    // What has just arrived is passed on in the next pass.
    for (const int child : children_) {
      if (parent_ >= 0) transfers_.set_limit(child, transfers_.done(parent_));
    }
    return copy_in_pieces(copy_, context()) && done;
  }

 private:
  ChunkedTransfers transfers_;
  LocalCopy copy_;
  int parent_ = -1;
  std::vector<int> children_;
  bool started_ = false;
};

/// Every rank sends block j to rank j, and reduces the blocks it gets, chunk by chunk and in rank
/// order.
class ReducescatterWork final : public FlatWork {
 public:
  ReducescatterWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(shared)),
        collective_(collective),
        own_(Blocks(collective.counts, size_of(collective.dtype)).of(in, context().rank())),
        out_(out),
        transfers_(context()),
        receives_(static_cast<std::size_t>(context().size()), -1) {
    const int ranks = context().size();
    const Blocks blocks(collective.counts, size_of(collective.dtype));
    std::byte* ring =
        context().buffer().reserve(static_cast<std::size_t>(ranks) * transfers_.ring_bytes());
    for (int distance = 1; distance < ranks; ++distance) {
      const int peer = (context().rank() + distance) % ranks;
      receives_[static_cast<std::size_t>(peer)] =
          transfers_.add_ring_receive(peer, ring, own_.size());
      transfers_.add_send(peer, blocks.of(in, peer));
      ring += transfers_.ring_bytes();
    }
  }

 protected:
  bool step() override {
    if (!std::exchange(started_, true)) transfers_.start();
    const bool arrived = transfers_.step();
    const std::size_t before = reduced_;
    while (reduced_ < own_.size() && next_chunk_is_here()) {
      if ((reduced_ - before) * receives_.size() >= kBytesPerCall) {
        context().give_way();
        break;
      }
      reduce_chunk();
    }
    return arrived && reduced_ == own_.size();
  }

 private:
  std::size_t next_bytes() const { return std::min(chunk_bytes_, own_.size() - reduced_); }
  bool next_chunk_is_here() const {
    return std::all_of(receives_.begin(), receives_.end(), [&](int transfer) {
      return transfer < 0 || transfers_.done(transfer) >= reduced_ + next_bytes();
    });
  }
  void reduce_chunk() {
    const std::size_t bytes = next_bytes();
    for (std::size_t rank = 0; rank < receives_.size(); ++rank) {
      context().sources[rank] = receives_[rank] < 0 ? own_.data() + reduced_
                                                    : transfers_.ring_at(receives_[rank], reduced_);
    }
    const auto count = static_cast<std::int64_t>(bytes / size_of(collective_.dtype));
    reduce(context().sources, out_.data() + reduced_, count, collective_.dtype, collective_.op,
           collective_.scale);
    reduced_ += bytes;
    for (const int transfer : receives_) {
      if (transfer >= 0) transfers_.set_limit(transfer, reduced_);
    }
  }

  const Collective collective_;
  const std::span<const std::byte> own_;
  const std::span<std::byte> out_;
  ChunkedTransfers transfers_;
  std::vector<int> receives_;  ///< transfer per rank; -1 for this one
  const std::size_t chunk_bytes_ = context().tuning().chunk_bytes;
  std::size_t reduced_ = 0;
  bool started_ = false;
};

}  // namespace

std::unique_ptr<Work> make_broadcast_work(std::shared_ptr<ChannelContext> context,
                                          const Collective& collective,
                                          std::span<const std::byte> in, std::span<std::byte> out) {
  return std::make_unique<BroadcastWork>(std::move(context), collective, in, out);
}

std::unique_ptr<Work> make_allgather_work(std::shared_ptr<ChannelContext> context,
                                          const Collective& collective,
                                          std::span<const std::byte> in, std::span<std::byte> out) {
  const Blocks blocks(collective.counts, size_of(collective.dtype));
  const int ranks = context->size();
  const int own = context->rank();
  auto work = std::make_unique<ExchangeWork>(std::move(context));
  for (int distance = 0; distance < ranks; ++distance) {
    const int peer = (own + distance) % ranks;
    work->add(peer, in, blocks.of(out, peer));
  }
  return work;
}

std::unique_ptr<Work> make_alltoall_work(std::shared_ptr<ChannelContext> context,
                                         const Collective& collective,
                                         std::span<const std::byte> in, std::span<std::byte> out) {
  const Blocks sent(collective.send_counts, size_of(collective.dtype));
  const Blocks received(collective.counts, size_of(collective.dtype));
  const int ranks = context->size();
  const int own = context->rank();
  auto work = std::make_unique<ExchangeWork>(std::move(context));
  for (int distance = 0; distance < ranks; ++distance) {
    const int peer = (own + distance) % ranks;
    work->add(peer, sent.of(in, peer), received.of(out, peer));
  }
  return work;
}

std::unique_ptr<Work> make_reducescatter_work(std::shared_ptr<ChannelContext> context,
                                              const Collective& collective,
                                              std::span<const std::byte> in,
                                              std::span<std::byte> out) {
  return std::make_unique<ReducescatterWork>(std::move(context), collective, in, out);
}

}  // namespace hvd::flat
