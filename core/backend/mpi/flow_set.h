#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/mpi/lane.h"

namespace hvd::mpi {

/// Transfers of any size with any peers, cut into chunks, a few of which are under way with each
/// peer.
///
/// Not thread-safe: the thread that drives the engine. Chunks of a flow are sent, and received, in
/// order; a flow's first bytes may be used while the rest travels.
class FlowSet {
 public:
  explicit FlowSet(Lane& lane) : lane_(lane) {}

  /// One flow per peer and direction. Empty flows send nothing. Returns the flow's number. Not
  /// after start().
  int add_send(int peer, std::span<const std::byte> bytes);
  int add_receive(int peer, std::span<std::byte> bytes);
  /// Receives `bytes` bytes into room for `outstanding_chunks` chunks (see ring_bytes()) that is
  /// used again and again.
  int add_ring_receive(int peer, std::byte* ring, std::size_t bytes);
  std::size_t ring_bytes() const noexcept;

  void start();
  /// Posts what may be posted and collects what has arrived. True once all flows are done.
  bool step();

  /// A send flow may not go beyond this many bytes yet, a ring receive not beyond this many plus
  /// the ring.
  void set_limit(int flow, std::size_t bytes) noexcept { flow_at(flow).limit = bytes; }
  /// The bytes at the beginning of the flow that have been sent or received.
  std::size_t done(int flow) const noexcept;
  /// Where the byte at `offset` (the start of a chunk) of a ring receive lies.
  const std::byte* ring_at(int flow, std::size_t offset) const noexcept;

 private:
  enum class Kind : std::uint8_t { kSend, kReceive, kRingReceive };
  struct Flow {
    Kind kind = Kind::kSend;
    int peer = 0;
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::size_t bytes = 0;
    std::size_t limit = 0;
    std::size_t posted = 0;    ///< chunks
    std::size_t finished = 0;  ///< chunks, without a gap
  };

  Flow& flow_at(int flow) noexcept { return flows_[static_cast<std::size_t>(flow)]; }
  const Flow& flow_at(int flow) const noexcept { return flows_[static_cast<std::size_t>(flow)]; }
  std::size_t chunks(const Flow& flow) const noexcept {
    return (flow.bytes + chunk() - 1) / chunk();
  }
  std::size_t chunk() const noexcept { return lane_.tuning().chunk_bytes; }
  std::size_t outstanding() const noexcept {
    return static_cast<std::size_t>(lane_.tuning().outstanding_chunks);
  }
  bool may_post(const Flow&) const noexcept;
  void post(std::size_t index);
  bool advance();

  Lane& lane_;
  std::vector<Flow> flows_;
};

}  // namespace hvd::mpi
