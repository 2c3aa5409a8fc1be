#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/flat/flat_work.h"
#include "kernels/kernels.h"

// Broadcast, allgather, alltoall and reducescatter. Each sends its data in chunks, a few of which
// are under way with each peer.

namespace hvd::flat {
namespace {

/// Transfers of any size with any peers, cut into chunks. At most one transfer per peer and
/// direction.
///
/// The chunks of a transfer are sent and received in order, so the first bytes may be used while
/// the rest is under way.
class ChunkedTransfers {
 public:
  explicit ChunkedTransfers(FlatChannelState& channel) : channel_(channel) {}

  /// Returns the index of the transfer. An empty transfer sends no message. Call before start().
  int add_send(int peer, std::span<const std::byte> bytes) {
    return add(
        {.peer = peer, .source = bytes.data(), .bytes = bytes.size(), .limit = bytes.size()});
  }
  int add_receive(int peer, std::span<std::byte> bytes) {
    return add({.peer = peer, .destination = bytes.data(), .bytes = bytes.size()});
  }
  /// Receives `bytes` bytes into a ring of ring_bytes() bytes.
  int add_ring_receive(int peer, std::byte* ring, std::size_t bytes) {
    return add({.peer = peer, .destination = ring, .is_ring = true, .bytes = bytes});
  }
  std::size_t ring_bytes() const noexcept { return outstanding() * chunk(); }

  void start() { channel_.requests().reset(transfers_.size() * outstanding()); }
  /// Starts the messages that may start and collects those that have completed. True once all
  /// transfers are complete.
  bool step() {
    if (advance()) return true;
    if (channel_.test().empty()) return false;
    return advance();
  }

  /// Lets a send proceed up to this many bytes for now, and a ring receive up to this many bytes
  /// plus ring_bytes().
  void set_limit(int transfer, std::size_t bytes) noexcept { at(transfer).limit = bytes; }
  /// How many bytes have been sent or received, counted from the beginning of the transfer without
  /// a gap.
  std::size_t done(int transfer) const noexcept {
    return std::min(at(transfer).bytes, at(transfer).finished * chunk());
  }
  /// The address of a ring receive's byte at `offset`, which is the start of a chunk.
  const std::byte* ring_at(int transfer, std::size_t offset) const noexcept {
    return at(transfer).destination + offset / chunk() % outstanding() * chunk();
  }

 private:
  struct Transfer {
    int peer = 0;
    const std::byte* source = nullptr;  ///< of a send
    std::byte* destination = nullptr;   ///< of a receive; null: this is a send
    bool is_ring = false;               ///< the destination is a ring
    std::size_t bytes = 0;
    std::size_t limit = 0;     ///< see set_limit()
    std::size_t posted = 0;    ///< chunks
    std::size_t finished = 0;  ///< chunks, without a gap
  };

  int add(const Transfer& transfer) {
    transfers_.push_back(transfer);
    return static_cast<int>(transfers_.size()) - 1;
  }

  bool advance() {
    bool complete = true;
    for (std::size_t index = 0; index < transfers_.size(); ++index) {
      Transfer& transfer = transfers_[index];
      while (transfer.finished < transfer.posted &&
             channel_.requests().idle(index * outstanding() + transfer.finished % outstanding()))
        ++transfer.finished;
      while (may_post(transfer)) post(index);
      complete = complete && transfer.finished == chunks(transfer);
    }
    return complete;
  }

  bool may_post(const Transfer& transfer) const noexcept {
    if (transfer.posted == chunks(transfer) || transfer.posted - transfer.finished == outstanding())
      return false;
    const std::size_t end = (transfer.posted + 1) * chunk();
    if (transfer.is_ring) return end <= transfer.limit + ring_bytes();
    return transfer.destination != nullptr || std::min(transfer.bytes, end) <= transfer.limit;
  }

  void post(std::size_t index) {
    Transfer& transfer = transfers_[index];
    const std::size_t offset = transfer.posted * chunk();
    const std::size_t bytes = std::min(chunk(), transfer.bytes - offset);
    const std::size_t place = transfer.posted % outstanding();
    const std::size_t request = index * outstanding() + place;
    if (transfer.destination == nullptr) {
      channel_.send(request, {transfer.source + offset, bytes}, transfer.peer, kChunkKind);
    } else {
      const std::size_t at = transfer.is_ring ? place * chunk() : offset;
      channel_.receive(request, {transfer.destination + at, bytes}, transfer.peer, kChunkKind);
    }
    ++transfer.posted;
  }

  Transfer& at(int transfer) noexcept { return transfers_[static_cast<std::size_t>(transfer)]; }
  const Transfer& at(int transfer) const noexcept {
    return transfers_[static_cast<std::size_t>(transfer)];
  }
  std::size_t chunks(const Transfer& transfer) const noexcept {
    return (transfer.bytes + chunk() - 1) / chunk();
  }
  std::size_t chunk() const noexcept { return channel_.tuning().chunk_bytes; }
  std::size_t outstanding() const noexcept {
    return static_cast<std::size_t>(channel_.tuning().outstanding_chunks);
  }

  FlatChannelState& channel_;
  std::vector<Transfer> transfers_;
};

/// Copies this rank's own data in pieces. Messages make progress between the pieces.
class OwnCopy {
 public:
  OwnCopy() = default;
  OwnCopy(std::span<const std::byte> from, std::byte* to) noexcept : from_(from), to_(to) {
    if (from.data() == to) from_ = {};
  }
  /// Copies one piece. True once all is copied.
  bool step(FlatChannelState& channel) noexcept {
    const std::size_t bytes = std::min(kBytesPerCall, from_.size());
    if (bytes > 0) std::memcpy(to_, from_.data(), bytes);
    from_ = from_.subspan(bytes);
    to_ += bytes;
    if (!from_.empty()) channel.give_way();
    return from_.empty();
  }

 private:
  std::span<const std::byte> from_;
  std::byte* to_ = nullptr;
};

/// Adjacent blocks of different sizes, one per rank.
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

/// Allgather and alltoall: sends a block to each peer, receives one from each, and copies its own.
class FlatExchange final : public FlatWork {
 public:
  FlatExchange(std::shared_ptr<FlatChannelState> state, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(state)), transfers_(channel()) {
    const Blocks sent(collective.send_counts, size_of(collective.dtype));
    const Blocks received(collective.counts, size_of(collective.dtype));
    const bool sends_blocks = collective.kind == OpKind::kAlltoall;
    for (int distance = 0; distance < channel().size(); ++distance) {
      const int peer = (channel().rank() + distance) % channel().size();
      const std::span<const std::byte> to_peer = sends_blocks ? sent.of(in, peer) : in;
      const std::span<std::byte> from_peer = received.of(out, peer);
      if (distance == 0) {
        copy_ = OwnCopy(to_peer, from_peer.data());
        continue;
      }
      transfers_.add_receive(peer, from_peer);
      transfers_.add_send(peer, to_peer);
    }
  }

 protected:
  bool step() override {
    if (!std::exchange(started_, true)) transfers_.start();
    const bool exchanged = transfers_.step();
    return copy_.step(channel()) && exchanged;
  }

 private:
  ChunkedTransfers transfers_;
  OwnCopy copy_;
  bool started_ = false;
};

/// Broadcasts along a binomial tree, in which every rank forwards each chunk when it has arrived.
class FlatBroadcast final : public FlatWork {
 public:
  FlatBroadcast(std::shared_ptr<FlatChannelState> state, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(state)), transfers_(channel()) {
    const int ranks = channel().size();
    // Relative ranks count from the root.
    const int own = (channel().rank() - collective.root + ranks) % ranks;
    const auto absolute = [&](int relative) { return (relative + collective.root) % ranks; };
    const bool is_root = own == 0;
    if (is_root) copy_ = OwnCopy(in, out.data());
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
    // The next pass forwards the data that has just arrived.
    for (const int child : children_) {
      if (parent_ >= 0) transfers_.set_limit(child, transfers_.done(parent_));
    }
    return copy_.step(channel()) && done;
  }

 private:
  ChunkedTransfers transfers_;
  OwnCopy copy_;
  int parent_ = -1;
  std::vector<int> children_;
  bool started_ = false;
};

/// Every rank sends block j to rank j, and reduces the blocks that it receives, chunk by chunk and
/// in rank order.
class FlatReducescatter final : public FlatWork {
 public:
  FlatReducescatter(std::shared_ptr<FlatChannelState> state, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : FlatWork(std::move(state)),
        collective_(collective),
        own_(Blocks(collective.counts, size_of(collective.dtype)).of(in, channel().rank())),
        out_(out),
        transfers_(channel()),
        receives_(static_cast<std::size_t>(channel().size()), -1) {
    const int ranks = channel().size();
    const Blocks blocks(collective.counts, size_of(collective.dtype));
    std::byte* ring =
        channel().buffer().reserve(static_cast<std::size_t>(ranks) * transfers_.ring_bytes());
    for (int distance = 1; distance < ranks; ++distance) {
      const int peer = (channel().rank() + distance) % ranks;
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
    while (reduced_ < own_.size() && next_chunk_arrived()) {
      if ((reduced_ - before) * receives_.size() >= kBytesPerCall) {
        channel().give_way();
        break;
      }
      reduce_chunk();
    }
    return arrived && reduced_ == own_.size();
  }

 private:
  std::size_t next_bytes() const { return std::min(chunk_bytes_, own_.size() - reduced_); }
  bool next_chunk_arrived() const {
    return std::all_of(receives_.begin(), receives_.end(), [&](int transfer) {
      return transfer < 0 || transfers_.done(transfer) >= reduced_ + next_bytes();
    });
  }
  void reduce_chunk() {
    const std::size_t bytes = next_bytes();
    for (std::size_t rank = 0; rank < receives_.size(); ++rank) {
      channel().sources[rank] = receives_[rank] < 0 ? own_.data() + reduced_
                                                    : transfers_.ring_at(receives_[rank], reduced_);
    }
    const auto count = static_cast<std::int64_t>(bytes / size_of(collective_.dtype));
    reduce(channel().sources, out_.data() + reduced_, count, collective_.dtype, collective_.op,
           collective_.scale);
    reduced_ += bytes;
    for (const int transfer : receives_) {
      if (transfer >= 0) transfers_.set_limit(transfer, reduced_);
    }
  }

  const Collective collective_;
  const std::span<const std::byte> own_;  ///< this rank's block of its input
  const std::span<std::byte> out_;
  ChunkedTransfers transfers_;
  std::vector<int> receives_;  ///< transfer per rank; -1 for this one
  const std::size_t chunk_bytes_ = channel().tuning().chunk_bytes;
  std::size_t reduced_ = 0;  ///< bytes of the output
  bool started_ = false;
};

}  // namespace

std::unique_ptr<Work> make_work(const std::shared_ptr<FlatChannelState>& state,
                                const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kAllreduce:
      return make_allreduce(state, collective, in, out);
    case OpKind::kBroadcast:
      return std::make_unique<FlatBroadcast>(state, collective, in, out);
    case OpKind::kReducescatter:
      return std::make_unique<FlatReducescatter>(state, collective, in, out);
    default:
      return std::make_unique<FlatExchange>(state, collective, in, out);
  }
}

}  // namespace hvd::flat
