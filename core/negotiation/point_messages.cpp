#include "negotiation/point_messages.h"

#include <limits>
#include <type_traits>
#include <utility>

#include "base/text.h"
#include "negotiation/messages.h"

namespace hvd::wire {
namespace {

constexpr std::uint64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

enum OfferFlag : std::uint8_t { kNamed = 1, kEager = 2, kAllOfferFlags = 3 };

void write_cause(Writer& out, const Status& cause) {
  out.u8(static_cast<std::uint8_t>(cause.code));
  out.text(std::string_view(cause.message).substr(0, kMaxTextBytes));
}

Status read_cause(Reader& in) {
  const std::uint8_t code = in.u8("status");
  if (code == 0 || code >= kStatusCodeCount)
    in.fail("status", text("expected an error, got ", code));
  return {static_cast<StatusCode>(code), in.text("message", kMaxTextBytes), -1};
}

void write_bytes(Writer& out, std::span<const std::byte> bytes) {
  out.varint(bytes.size());
  out.raw(bytes);
}

std::span<const std::byte> read_bytes(Reader& in, const char* field, std::size_t most) {
  const std::size_t size = in.count(field, most);
  return in.raw(field, size);
}

struct Write {
  Writer& out;

  void operator()(const Offer& offer) const {
    const MessageKey& key = offer.key;
    out.varint(offer.send);
    out.u8(static_cast<std::uint8_t>((key.name.empty() ? 0 : kNamed) | (offer.eager ? kEager : 0)));
    out.varint(static_cast<std::uint64_t>(key.process_set));
    key.name.empty() ? out.zigzag(key.tag) : out.text(key.name);
    out.u8(static_cast<std::uint8_t>(offer.dtype));
    out.varint(offer.elements);
    if (offer.eager) out.raw(offer.payload);
  }
  void operator()(const Piece& piece) const {
    out.varint(piece.send);
    out.varint(piece.offset);
    write_bytes(out, piece.bytes);
  }
  void operator()(const SharedPiece& piece) const {
    out.varint(piece.send);
    out.varint(piece.offset);
    out.varint(piece.bytes);
  }
  void operator()(const Recall& recall) const { out.varint(recall.send); }
  void operator()(const Withdrawal& withdrawal) const {
    out.varint(withdrawal.send);
    write_cause(out, withdrawal.cause);
  }
  void operator()(const Received& received) const {
    out.varint(received.send);
    out.varint(received.bytes);
  }
  void operator()(const Refusal& refusal) const {
    out.varint(refusal.send);
    write_cause(out, refusal.cause);
  }
  void operator()(const Window&) const {}
  void operator()(const Awaiting&) const {}
  void operator()(const Leaving&) const {}
  void operator()(const Inquiry& inquiry) const { out.varint(inquiry.recv); }
  void operator()(const Answer& answer) const {
    out.varint(answer.recv);
    out.text(std::string_view(answer.activity).substr(0, kMaxTextBytes));
  }
};

std::uint64_t read_number(Reader& in, const char* field) { return in.varint(field, kAnyNumber); }

Offer read_offer(Reader& in) {
  Offer offer{.send = read_number(in, "send")};
  const std::uint8_t flags = in.u8("offer flags");
  if (flags > kAllOfferFlags) in.fail("offer flags", text("unknown flag, got ", flags));
  offer.key.process_set = static_cast<int>(in.varint("process set", kMaxInt));
  if ((flags & kNamed) != 0) {
    offer.key.name = in.text("name", kMaxNameBytes);
    if (offer.key.name.empty()) in.fail("name", "flagged, but empty");
  } else {
    offer.key.tag = in.zigzag("tag");
  }
  const std::uint8_t dtype = in.u8("dtype");
  if (dtype >= kDataTypeCount)
    in.fail("dtype", text("expected less than ", kDataTypeCount, ", got ", dtype));
  offer.dtype = static_cast<DataType>(dtype);
  offer.elements = in.varint("elements", kMaxBytes / size_of(offer.dtype));
  offer.eager = (flags & kEager) != 0;
  if (!offer.eager) return offer;
  if (offer.bytes() > kEagerBytes)
    in.fail("elements", text("expected at most ", kEagerBytes, " bytes, got ", offer.bytes()));
  offer.payload = in.raw("payload", offer.bytes());
  return offer;
}

PointMessage read_step(Reader& in, std::uint8_t step) {
  switch (step) {
    case 0:
      return read_offer(in);
    case 1: {
      Piece piece{.send = read_number(in, "send"), .offset = in.varint("offset", kMaxBytes)};
      piece.bytes = read_bytes(in, "piece", kPieceBytes);
      return piece;
    }
    case 2:
      return Recall{read_number(in, "send")};
    case 3: {
      const std::uint64_t send = read_number(in, "send");
      return Withdrawal{send, read_cause(in)};
    }
    case 4: {
      const std::uint64_t send = read_number(in, "send");
      return Received{send, in.varint("bytes", kMaxBytes)};
    }
    case 5: {
      const std::uint64_t send = read_number(in, "send");
      return Refusal{send, read_cause(in)};
    }
    case 6:
      return Awaiting{};
    case 7:
      return Leaving{};
    case 8:
      return Inquiry{read_number(in, "recv")};
    case 9: {
      const std::uint64_t recv = read_number(in, "recv");
      return Answer{recv, in.text("activity", kMaxTextBytes)};
    }
    case 10: {
      SharedPiece piece{.send = read_number(in, "send"), .offset = in.varint("offset", kMaxBytes)};
      piece.bytes = in.varint("piece", kPieceBytes);
      return piece;
    }
    case 11:
      return Window{};
    default:
      in.fail("step", text("unknown, got ", step));
  }
}

}  // namespace

std::string describe(const MessageKey& key) {
  const std::string what = key.name.empty() ? text("tag ", key.tag) : text("'", key.name, "'");
  return key.process_set == 0 ? what : text(what, " of process set ", key.process_set);
}

Bytes encode(const PointMessage& message) {
  Writer out = start(MessageKind::kPointToPoint);
  out.u8(static_cast<std::uint8_t>(message.index()));
  std::visit(Write{out}, message);
  return std::move(out).take();
}

PointMessage read_point_message(Reader& in) { return read_step(in, in.u8("step")); }

}  // namespace hvd::wire
