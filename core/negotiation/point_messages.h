#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "hvd/status.h"
#include "hvd/types.h"
#include "negotiation/codec.h"

/// The control messages of send and recv, which ranks exchange without the coordinator.
/// docs/protocol.md has the grammar and the order.
namespace hvd::wire {

/// The largest message that travels with its offer.
inline constexpr std::size_t kEagerBytes = std::size_t{8} << 10;
/// The largest piece of a message that follows its offer.
inline constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

/// Selects a message among those of two ranks in a process set: by name, or, if that is empty, by
/// tag.
struct MessageKey {
  int process_set = 0;
  std::string name = {};
  std::int64_t tag = 0;  ///< 0 if there is a name
  friend auto operator<=>(const MessageKey&, const MessageKey&) = default;
};

/// For error texts: "tag 5", "'activations'", "tag 5 of process set 2".
std::string describe(const MessageKey&);

// From the sender. `send` is the number of the send on that rank. Spans refer to the bytes that
// were decoded.

/// The rank offers a message. A small message is included.
struct Offer {
  std::uint64_t send = 0;
  MessageKey key = {};
  DataType dtype = DataType::kUInt8;
  std::uint64_t elements = 0;
  bool eager = false;
  std::span<const std::byte> payload = {};  ///< if eager
  std::size_t bytes() const noexcept { return elements * size_of(dtype); }
};
/// The next bytes of an accepted message.
struct Piece {
  std::uint64_t send = 0;
  std::uint64_t offset = 0;
  std::span<const std::byte> bytes = {};
};
/// Like a Piece, but its bytes are in the next slot of the window between the two ranks.
struct SharedPiece {
  std::uint64_t send = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// The send has waited for too long. The receiver refuses the send, unless it has already accepted
/// it.
struct Recall {
  std::uint64_t send = 0;
};
/// The send has ended with an error at the sender.
struct Withdrawal {
  std::uint64_t send = 0;
  Status cause = {};
};

// From the receiver, about a send of the other rank.

/// A recv matches the offer and has received this many of its bytes. The send is done when it has
/// received all.
struct Received {
  std::uint64_t send = 0;
  std::uint64_t bytes = 0;
};
/// Pieces of the other rank's sends may go through shared memory, whose name follows from the two
/// ranks.
struct Window {};
/// The send ends with this error.
struct Refusal {
  std::uint64_t send = 0;
  Status cause = {};
};

// From a rank with an unmatched recv to each rank that may send the message, and back.

/// A recv waits. The other rank answers with Leaving when it has called shutdown().
struct Awaiting {};
/// The rank starts no more sends.
struct Leaving {};
/// The recv has waited for too long: asks for the activity of the other rank.
struct Inquiry {
  std::uint64_t recv = 0;
};
struct Answer {
  std::uint64_t recv = 0;
  std::string activity = {};
};

/// The alternatives' positions travel on the wire: append only.
using PointMessage = std::variant<Offer, Piece, Recall, Withdrawal, Received, Refusal, Awaiting,
                                  Leaving, Inquiry, Answer, SharedPiece, Window>;

Bytes encode(const PointMessage&);
/// Reads the message after its header. @throws WireError
PointMessage read_point_message(Reader&);

}  // namespace hvd::wire
