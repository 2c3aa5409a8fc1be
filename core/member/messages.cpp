#include "member/messages.h"

#include <string_view>
#include <utility>

#include "base/text.h"
#include "negotiation/messages.h"

namespace hvd::member {
namespace {

using wire::kAnyNumber;
using wire::kMaxTextBytes;
using wire::Reader;
using wire::Writer;

constexpr std::uint8_t kMagic = 0x6d;  // 'm'
constexpr std::uint8_t kVersion = 2;
/// Kinds of messages to a worker begin here.
constexpr std::uint8_t kFirstToWorker = 0x20;

Writer start(std::size_t kind) {
  Writer out;
  out.u8(kMagic);
  out.u8(kVersion);
  out.u8(static_cast<std::uint8_t>(kind));
  return out;
}

void put_text(Writer& out, const std::string& value, std::size_t max_bytes = kMaxTextBytes) {
  out.text(std::string_view(value).substr(0, max_bytes));
}

void put(Writer& out, const StateSummary& state) {
  out.varint(state.commit);
  out.u8(static_cast<std::uint8_t>(state.kind));
  out.varint(state.hash);
}

struct Write {
  Writer& out;

  void operator()(const Join& join) const { put_text(out, join.program); }
  void operator()(const Ready& ready) const {
    out.varint(ready.generation);
    put(out, ready.state);
    out.u8(ready.can_load ? 1 : 0);
    out.u8(ready.divided ? 1 : 0);
    put_text(out, ready.address, kMaxAddressBytes);
  }
  void operator()(const Synced& synced) const {
    out.varint(synced.generation);
    put(out, synced.state);
  }
  void operator()(const Failed& failed) const {
    out.varint(failed.generation);
    out.u8(failed.accused ? 1 : 0);
    if (failed.accused) out.varint(*failed.accused);
    put_text(out, failed.cause);
  }
  void operator()(const AtEnd& end) const { out.varint(end.generation); }
  void operator()(const Begun& begun) const {
    out.varint(begun.change);
    out.varint(begun.commit);
  }
  void operator()(const Pong&) const {}
  void operator()(const ProgramFailed& failed) const {
    out.varint(failed.generation);
    out.varint(failed.commit);
    put_text(out, failed.cause);
  }

  void operator()(const Reset& reset) const {
    out.varint(reset.generation);
    put_text(out, reset.cause);
  }
  void operator()(const Assign& assign) const {
    out.varint(assign.generation);
    out.u8(assign.load ? 1 : 0);
    put(out, assign.state);
    out.varint(assign.seats.size());
    for (const Seat& seat : assign.seats) {
      out.varint(seat.worker);
      out.u8(seat.receives ? 1 : 0);
      put_text(out, seat.address, kMaxAddressBytes);
    }
    out.varint(assign.root);
  }
  void operator()(const Go& go) const { out.varint(go.generation); }
  void operator()(const Prepare& prepare) const {
    out.varint(prepare.change);
    out.varint(prepare.generation);
  }
  void operator()(const Target& target) const {
    out.varint(target.change);
    out.varint(target.commit);
    out.varint(target.next);
    out.varint(target.leaving.size());
    for (const WorkerId worker : target.leaving) out.varint(worker);
  }
  void operator()(const End&) const {}
  void operator()(const Ping&) const {}
  void operator()(const Refused& refused) const { put_text(out, refused.reason); }
};

std::uint64_t number(Reader& in, const char* field) { return in.varint(field, kAnyNumber); }

bool read_switch(Reader& in, const char* field) {
  const std::uint8_t value = in.u8(field);
  if (value > 1) in.fail(field, text("expected 0 or 1, got ", value));
  return value == 1;
}

StateSummary read_state(Reader& in) {
  StateSummary state{.commit = number(in, "commit")};
  const std::uint8_t kind = in.u8("state");
  if (kind >= kStateKindCount)
    in.fail("state", text("expected less than ", kStateKindCount, ", got ", kind));
  state.kind = static_cast<StateKind>(kind);
  state.hash = number(in, "hash");
  return state;
}

Assign read_assign(Reader& in) {
  Assign assign{.generation = number(in, "generation"), .load = read_switch(in, "load")};
  assign.state = read_state(in);
  const std::size_t count = in.count("seats", wire::kMaxRanks);
  if (count == 0) in.fail("seats", "expected at least one");
  for (std::size_t i = 0; i < count; ++i) {
    Seat seat{.worker = number(in, "worker"), .receives = read_switch(in, "receives")};
    seat.address = in.text("address", kMaxAddressBytes);
    assign.seats.push_back(std::move(seat));
  }
  assign.root = static_cast<std::uint32_t>(in.varint("root", count - 1));
  return assign;
}

ToCoordinator read_to_coordinator(Reader& in, std::uint8_t kind) {
  switch (kind) {
    case 0:
      return Join{in.text("program", kMaxTextBytes)};
    case 1: {
      Ready ready{.generation = number(in, "generation")};
      ready.state = read_state(in);
      ready.can_load = read_switch(in, "can load");
      ready.divided = read_switch(in, "divided");
      ready.address = in.text("address", kMaxAddressBytes);
      return ready;
    }
    case 2: {
      const Generation generation = number(in, "generation");
      return Synced{generation, read_state(in)};
    }
    case 3: {
      Failed failed{.generation = number(in, "generation")};
      if (read_switch(in, "accuses")) failed.accused = number(in, "accused");
      failed.cause = in.text("cause", kMaxTextBytes);
      return failed;
    }
    case 4:
      return AtEnd{number(in, "generation")};
    case 5: {
      const std::uint64_t change = number(in, "change");
      return Begun{change, number(in, "commit")};
    }
    case 6:
      return Pong{};
    case 7: {
      ProgramFailed failed{.generation = number(in, "generation")};
      failed.commit = number(in, "commit");
      failed.cause = in.text("cause", kMaxTextBytes);
      return failed;
    }
    default:
      in.fail("kind", text("unknown, got ", kind));
  }
}

ToWorker read_to_worker(Reader& in, std::uint8_t kind) {
  switch (kind) {
    case kFirstToWorker + 0: {
      const Generation generation = number(in, "generation");
      return Reset{generation, in.text("cause", kMaxTextBytes)};
    }
    case kFirstToWorker + 1:
      return read_assign(in);
    case kFirstToWorker + 2:
      return Go{number(in, "generation")};
    case kFirstToWorker + 3: {
      const std::uint64_t change = number(in, "change");
      return Prepare{change, number(in, "generation")};
    }
    case kFirstToWorker + 4: {
      Target target{.change = number(in, "change")};
      target.commit = number(in, "commit");
      target.next = number(in, "next generation");
      const std::size_t count = in.count("leaving", wire::kMaxRanks);
      for (std::size_t i = 0; i < count; ++i)
        target.leaving.push_back(number(in, "leaving worker"));
      return target;
    }
    case kFirstToWorker + 5:
      return End{};
    case kFirstToWorker + 6:
      return Ping{};
    case kFirstToWorker + 7:
      return Refused{in.text("reason", kMaxTextBytes)};
    default:
      in.fail("kind", text("unknown, got ", kind));
  }
}

std::uint8_t read_header(Reader& in) {
  if (in.u8("magic") != kMagic) in.fail("magic", "not a message of membership");
  const std::uint8_t version = in.u8("version");
  if (version != kVersion) in.fail("version", text("expected ", kVersion, ", got ", version));
  return in.u8("kind");
}

}  // namespace

wire::Bytes encode(const ToCoordinator& message) {
  Writer out = start(message.index());
  std::visit(Write{out}, message);
  return std::move(out).take();
}

wire::Bytes encode(const ToWorker& message) {
  Writer out = start(kFirstToWorker + message.index());
  std::visit(Write{out}, message);
  return std::move(out).take();
}

ToCoordinator decode_to_coordinator(std::span<const std::byte> bytes) {
  Reader in(bytes);
  ToCoordinator message = read_to_coordinator(in, read_header(in));
  in.expect_end();
  return message;
}

ToWorker decode_to_worker(std::span<const std::byte> bytes) {
  Reader in(bytes);
  ToWorker message = read_to_worker(in, read_header(in));
  in.expect_end();
  return message;
}

}  // namespace hvd::member
