#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/flat/flat_channel_context.h"

namespace hvd::flat {

/// Transfers of any size with any peers, cut into chunks, of which a few are in flight with each
/// peer.
///
/// Not thread-safe: the thread that drives the engine. Chunks of a transfer are sent, and received,
/// in order; a transfer's first bytes may be used while the rest travels.
class ChunkedTransfers {
 public:
  explicit ChunkedTransfers(ChannelContext& context) : context_(context) {}

  /// One transfer per peer and direction. Empty transfers send nothing. Returns the transfer's
  /// number. Not after start().
  int add_send(int peer, std::span<const std::byte> bytes);
  int add_receive(int peer, std::span<std::byte> bytes);
  /// Receives `bytes` bytes through a ring of `outstanding_chunks` chunks (see ring_bytes()).
  int add_ring_receive(int peer, std::byte* ring, std::size_t bytes);
  std::size_t ring_bytes() const noexcept;

  void start();
  /// Posts what may be posted and collects what has arrived. True once all transfers are done.
  bool step();

  /// A send transfer may not go beyond this many bytes yet, a ring receive not beyond this many
  /// plus the ring.
  void set_limit(int transfer, std::size_t bytes) noexcept { transfer_at(transfer).limit = bytes; }
  /// The bytes at the beginning of the transfer that have been sent or received.
  std::size_t done(int transfer) const noexcept;
  /// Where the byte at `offset` (the start of a chunk) of a ring receive lies.
  const std::byte* ring_at(int transfer, std::size_t offset) const noexcept;

 private:
  enum class Kind : std::uint8_t { kSend, kReceive, kRingReceive };
  struct Transfer {
    Kind kind = Kind::kSend;
    int peer = 0;
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::size_t bytes = 0;
    std::size_t limit = 0;
    std::size_t posted = 0;    ///< chunks
    std::size_t finished = 0;  ///< chunks, without a gap
  };

  Transfer& transfer_at(int transfer) noexcept {
    return transfers_[static_cast<std::size_t>(transfer)];
  }
  const Transfer& transfer_at(int transfer) const noexcept {
    return transfers_[static_cast<std::size_t>(transfer)];
  }
  std::size_t chunks(const Transfer& transfer) const noexcept {
    return (transfer.bytes + chunk() - 1) / chunk();
  }
  std::size_t chunk() const noexcept { return context_.tuning().chunk_bytes; }
  std::size_t outstanding() const noexcept {
    return static_cast<std::size_t>(context_.tuning().outstanding_chunks);
  }
  bool may_post(const Transfer&) const noexcept;
  void post(std::size_t index);
  bool advance();

  ChannelContext& context_;
  std::vector<Transfer> transfers_;
};

}  // namespace hvd::flat
