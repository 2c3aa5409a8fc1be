#include "transport/ucx/connections.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/broken_connection.h"
#include "base/expect.h"
#include "base/kept_memory.h"
#include "base/poll_until.h"
#include "hvd/error.h"

// Note [Connections go one way]
// Where two ranks connect to each other at the same time, UCX makes one connection of two; a rank
// that ends in that moment may take the other along, by an assertion of UCX 1.13. So no two workers
// ever connect to each other, and nothing is sent on a connection that is not complete:
//
// - A rank has a worker that sends and one that receives, for each plane. Who wants to send
//   connects, from its worker that sends to the receiver's that receives, and nobody has to ask
//   another one to connect.
// - The first message of a connection is a Hello. When it has come, the receiver makes its own end,
//   for which UCX takes the connection that is there. It needs it to learn of the sender's end, and
//   to answer. When the answer has come, both ends are complete, and what has waited is sent.
// - UCX tells the connections between two workers apart by counting them, so there is one only:
//   what is broken stays so, until a new generation has new workers.
//
// A worker that has nothing to receive is not let work: where a step is repeated, nothing is.

// Note [Primers]
// What comes before it is asked for, as all of the control plane does, UCX keeps in memory of its
// own, and makes that when the first message of about its size has come: room for 128 of them,
// every page of which it touches. A first step's report and plan (2 KiB each for 161 tensors) took
// 0.2 to 0.3 ms longer on their way, each. So who connects ahead sends a message of either size
// behind its Hello, and the receiver drops them.

// Note [Who has ended]
// UCX tells of the end of a process at once, on its connections: the kernel closes them. What a
// rank receives in the control plane is from anybody, so nobody waits for that very connection, and
// it is looked at by itself. A rank that leaves in order says so on the connections that it has
// made before it closes anything, and the order of messages is kept: whose connection breaks
// without that has not left in order. The connection the other way may break first, since it is
// another one; it counts only until the other rank has answered.

// Note [A worker that is not ended]
// UCX 1.13 checks itself with assertions that are always on, and closing connections by force while
// messages are under way meets them, here and in the peer: 6 of 248 live processes ended when some
// took back large messages from others. One more ends a process that destroys a worker while an
// answer to a peer's first message waits for that peer, which may be stopped. So after a failure
// nothing is closed: the worker is kept until the process ends, as other memory is then, and nobody
// lets it work. Over TCP all of a message's bytes are moved by the workers of sender and receiver,
// so none is read or written from then on, and no peer takes for a message what has been put in its
// place. Peers learn of a failure from the control plane.

namespace hvd::ucx {
namespace {

/// How long leaving in order waits for what is still to go out.
constexpr auto kFlushTime = std::chrono::milliseconds(500);
/// How long the end of connections that were closed by force is waited for: usually microseconds.
constexpr auto kForceTime = std::chrono::milliseconds(100);

/// A worker that always has something to do is let work for so often at a time.
constexpr int kMostRounds = 100;

/// Where nothing is being sent, the worker that sends is let work at one of so many looks.
constexpr unsigned kLooksPerLook = 8;

/// As they fill memory for 2 and 4 KiB (UCX_RX_MPOOL_SIZES).
constexpr std::size_t kPrimerBytes[] = {1500, 3000};

constexpr message::Plane kEveryPlane[] = {message::Plane::kControl, message::Plane::kData};
constexpr Side kEverySide[] = {Side::kControlIn, Side::kControlOut, Side::kDataIn, Side::kDataOut};

constexpr message::Plane plane_of(Side side) noexcept {
  return side == Side::kControlIn || side == Side::kControlOut ? message::Plane::kControl
                                                               : message::Plane::kData;
}

Membership checked(Membership members) {
  const std::size_t size = members.addresses.size();
  if (size > static_cast<std::size_t>(message::kMostRanks)) {
    throw Error("ucx: a job of " + std::to_string(size) + " ranks; message tags have room for " +
                std::to_string(message::kMostRanks));
  }
  if (members.generation >> message::kGenerationBits != 0) {
    throw Error("ucx: generation " + std::to_string(members.generation) +
                " has no room in message tags");
  }
  for (const auto& address : members.addresses) static_cast<void>(part_of(address, Side::kDataOut));
  return members;
}

template <typename Value>
std::span<const std::byte> bytes_of(const Value& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof value};
}

}  // namespace

Connections::Connections(Workers workers, Membership members)
    : members_(checked(std::move(members))),
      hello_{members_.rank},
      farewell_{members_.rank, 1},
      primer_(std::ranges::max(kPrimerBytes)),
      dropped_primer_(primer_.size()),
      memory_is_ours_(workers.touch_nothing_by_themselves),
      links_{std::vector<Link>(members_.addresses.size()),
             std::vector<Link>(members_.addresses.size())} {
  for (const Side side : kEverySide) {
    at(side).worker = std::move(workers.of[static_cast<std::size_t>(side)]);
    listen(side);
  }
}

Worker& Connections::worker(Side side) {
  if (ended(side)) throw Error("ucx: the connections to the other ranks have been closed");
  return *at(side).worker;
}

void Connections::raise(const char* what, int peer, Status status) const {
  for (const Side side : kEverySide) {
    if (ended(side)) continue;
    throw BrokenConnection(std::string("ucx: ") + what + " rank " + std::to_string(peer) +
                               " failed: " + at(side).worker->describe(status),
                           peer);
  }
  throw BrokenConnection(std::string("ucx: ") + what + " rank " + std::to_string(peer) +
                             " failed: the connections to the other ranks have been closed",
                         peer);
}

message::Tag Connections::hello_tag() const noexcept {
  return message::make_tag({.generation = members_.generation, .kind = message::kHelloKind});
}

message::Tag Connections::primer_tag() const noexcept {
  return message::make_tag({.generation = members_.generation, .kind = message::kPrimerKind});
}

void Connections::listen(Side side) {
  Place& place = at(side);
  place.listening =
      place.worker
          ->receive({reinterpret_cast<std::byte*>(&place.said), sizeof place.said}, hello_tag())
          .request;
}

bool Connections::run(Side side) {
  if (!worker(side).progress()) return false;
  hear(side);
  if (side == Side::kControlIn) drop_primers();
  return true;
}

void Connections::hear(Side side) {
  Place& place = at(side);
  while (place.listening != nullptr) {
    std::size_t bytes = 0;
    const Status status = place.worker->status_of_receive(place.listening, bytes);
    if (status == kInProgress) return;
    place.worker->free(std::exchange(place.listening, nullptr));
    const Hello said = place.said;
    listen(side);
    const bool known = said.rank >= 0 && index(said.rank) < members_.addresses.size();
    if (status != kOk || bytes != sizeof said || !known) continue;
    const message::Plane plane = plane_of(side);
    if (said.leaves != 0) {
      links_of(plane)[index(said.rank)].left = true;
    } else if (side == out_of(plane)) {
      be_answered(plane, said.rank);
    } else {
      answer(plane, said.rank);
    }
  }
}

void Connections::be_answered(message::Plane plane, int peer) {
  Link& link = links_of(plane)[index(peer)];
  if (link.out.failure != kOk) return;  // advance() tells those who wait
  link.answered = true;
  for (Outgoing* const message : std::exchange(link.waiting, {})) start(plane, link, *message);
}

void Connections::answer(message::Plane plane, int peer) {
  End& in = links_of(plane)[index(peer)].in;
  if (in.endpoint.handle == nullptr && in.failure == kOk)
    connect(in_of(plane), out_of(plane), peer, in);
}

void Connections::require_all_there(const std::function<bool(int)>& concerns) {
  for (const int peer : known_) {
    const Link& link = links_of(message::Plane::kControl)[index(peer)];
    if (!lost(link) || !concerns(peer)) continue;
    // A farewell may have come by now, on the one connection, that was not looked at before the
    // other one.
    for (int round = 0; round < kMostRounds && run(Side::kControlIn); ++round) {
    }
    if (lost(link)) {
      raise("the connection with", peer,
            link.in.failure != kOk ? link.in.failure : link.out.failure);
    }
  }
}

/// Also on a connection that is not complete: the other rank may be about to answer.
void Connections::say_farewell() noexcept {
  if (ended(Side::kControlOut)) return;
  Worker& out = *at(Side::kControlOut).worker;
  for (const Link& link : links_of(message::Plane::kControl)) {
    if (link.out.endpoint.handle == nullptr || link.out.failure != kOk) continue;
    const Started said = out.send(link.out.endpoint, bytes_of(farewell_), hello_tag());
    if (said.request != nullptr) out.free(said.request);
  }
}

/// Makes an end of this rank's worker, to that of the peer, and says hello. What goes wrong becomes
/// the end's failure.
void Connections::connect(Side own, Side of_peer, int peer, End& end) {
  if (plane_of(own) == message::Plane::kControl &&
      std::find(known_.begin(), known_.end(), peer) == known_.end())
    known_.push_back(peer);
  Worker& from = worker(own);
  const Status status =
      from.connect(part_of(members_.addresses[index(peer)], of_peer), &end.failure, end.endpoint);
  if (status != kOk) {
    end.failure = status;
    return;
  }
  const Started said = from.send(end.endpoint, bytes_of(hello_), hello_tag());
  if (said.request != nullptr) {
    from.free(said.request);
  } else if (said.status != kOk) {
    end.failure = said.status;
  }
}

void Connections::connect_ahead(message::Plane plane, int peer) {
  End& out = links_of(plane)[index(peer)].out;
  if (out.failure == kOk && out.endpoint.handle == nullptr) {
    connect(out_of(plane), in_of(plane), peer, out);
    if (plane == message::Plane::kControl && out.failure == kOk) send_primers(out);
  }
  ahead_.emplace_back(plane, peer);
}

/// What goes wrong, the Hello tells.
void Connections::send_primers(const End& end) {
  Worker& out = worker(Side::kControlOut);
  for (const std::size_t bytes : kPrimerBytes) {
    const Started said = out.send(end.endpoint, std::span(primer_).first(bytes), primer_tag());
    if (said.request != nullptr) out.free(said.request);
  }
}

void Connections::drop_primers() {
  Worker& in = worker(Side::kControlIn);
  while (const auto found = in.probe(primer_tag(), ~message::Tag{0})) {
    const Started dropped = in.receive(dropped_primer_, found->message);
    if (dropped.request != nullptr) in.free(dropped.request);
  }
}

bool Connections::connecting() const noexcept {
  return std::any_of(ahead_.begin(), ahead_.end(), [this](const auto& begun) {
    const Link& link = links_of(begun.first)[index(begun.second)];
    const bool complete = link.answered && link.in.endpoint.handle != nullptr;
    return !complete && link.out.failure == kOk && link.in.failure == kOk;
  });
}

void Connections::send(message::Plane plane, int peer, Outgoing& message) {
  static_cast<void>(worker(out_of(plane)));
  HVD_EXPECT(message.stage == Outgoing::Stage::kOver, "it is not under way");
  Link& link = links_of(plane)[index(peer)];
  message.stage = Outgoing::Stage::kWaiting;
  message.request = nullptr;
  message.status = kOk;
  ++sending_[static_cast<std::size_t>(plane)];
  if (link.out.failure == kOk && link.out.endpoint.handle == nullptr)
    connect(out_of(plane), in_of(plane), peer, link.out);
  if (link.out.failure != kOk) {
    end(plane, message, link.out.failure);
  } else if (link.answered) {
    start(plane, link, message);
  } else {
    link.waiting.push_back(&message);
  }
}

void Connections::start(message::Plane plane, Link& link, Outgoing& message) {
  message.stage = Outgoing::Stage::kSending;
  const Started started = worker(out_of(plane)).send(link.out.endpoint, message.bytes, message.tag);
  message.request = started.request;
  if (started.request == nullptr) end(plane, message, started.status);
}

void Connections::advance(message::Plane plane, int peer, Outgoing& message) {
  if (message.stage == Outgoing::Stage::kOver) return;
  Link& link = links_of(plane)[index(peer)];
  if (message.stage == Outgoing::Stage::kWaiting) {
    if (link.out.failure == kOk) return;
    const Status failure = link.out.failure;
    std::erase(link.waiting, &message);
    return end(plane, message, failure);
  }
  Worker& out = worker(out_of(plane));
  const Status status = out.status_of_send(message.request);
  if (status == kInProgress) return;
  out.free(std::exchange(message.request, nullptr));
  end(plane, message, status);
}

void Connections::end(message::Plane plane, Outgoing& message, Status status) noexcept {
  message.stage = Outgoing::Stage::kOver;
  message.request = nullptr;
  message.status = status;
  --sending_[static_cast<std::size_t>(plane)];
}

void Connections::forget(message::Plane plane, int peer, Outgoing& message) noexcept {
  if (message.stage == Outgoing::Stage::kOver) return;
  if (message.stage == Outgoing::Stage::kWaiting)
    std::erase(links_of(plane)[index(peer)].waiting, &message);
  if (message.request != nullptr) at(out_of(plane)).worker->free(message.request);
  end(plane, message, kCancelled);
}

bool Connections::progress(message::Plane plane, bool receives) {
  const auto number = static_cast<std::size_t>(plane);
  // A message that UCX calls sent may wait for room in a socket: a look now and then does for that.
  const bool looks = sending_[number] > 0 || ++looks_[number] % kLooksPerLook == 0;
  const bool moved = looks && run(out_of(plane));
  return (receives && run(in_of(plane))) || moved;
}

void Connections::close(Side side, End& closed, CloseMode mode) noexcept {
  if (closed.endpoint.handle == nullptr) return;
  // A broken one has nothing left to send.
  const CloseMode possible = closed.failure == kOk ? mode : CloseMode::kForce;
  const Started started = at(side).worker->close(std::exchange(closed.endpoint, {}), possible);
  if (started.request != nullptr) at(side).closing.push_back(started.request);
}

/// False: one that is not complete stays open.
bool Connections::close_sends() noexcept {
  bool all = true;
  for (const message::Plane plane : kEveryPlane) {
    for (Link& link : links_of(plane)) {
      if (link.answered) {
        close(out_of(plane), link.out, CloseMode::kFlush);
      } else if (link.out.endpoint.handle != nullptr) {
        all = false;
      }
    }
  }
  return all;
}

void Connections::close_receives() noexcept {
  for (const message::Plane plane : kEveryPlane)
    for (Link& link : links_of(plane)) close(in_of(plane), link.in, CloseMode::kForce);
}

bool Connections::closed(Side side) noexcept {
  Place& place = at(side);
  while (place.worker->progress()) {
  }
  std::erase_if(place.closing, [&](void* request) {
    if (place.worker->status_of_send(request) == kInProgress) return false;
    place.worker->free(request);
    return true;
  });
  return place.closing.empty();
}

bool Connections::all_closed() noexcept {
  bool all = true;
  for (const Side side : kEverySide) all = closed(side) && all;
  return all;
}

void Connections::forget_side(Side side) noexcept {
  for (Pending* const table : tables_) table->forget(side);
  Place& place = at(side);
  for (void* const request : place.closing) place.worker->free(request);
  place.closing.clear();
  if (place.listening != nullptr) place.worker->free(std::exchange(place.listening, nullptr));
}

void Connections::leave() noexcept {
  say_farewell();
  if (std::any_of(std::begin(kEverySide), std::end(kEverySide),
                  [this](Side s) { return ended(s); }))
    return silence();
  // Others who leave wait for this rank as it does for them. What they have sent is not awaited.
  const bool complete = close_sends();
  const bool flushed =
      poll_until(std::chrono::steady_clock::now() + kFlushTime, [this] { return all_closed(); });
  if (!complete || !flushed) return silence();
  close_receives();
  if (!poll_until(std::chrono::steady_clock::now() + kForceTime, [this] { return all_closed(); }))
    return silence();
  for (const Side side : kEverySide) {
    forget_side(side);
    at(side).worker.reset();
  }
}

void Connections::silence(Side side) noexcept {
  if (ended(side)) return;
  forget_side(side);
  keep_until_exit(std::shared_ptr<const Worker>(std::move(at(side).worker)));
}

void Connections::silence() noexcept {
  for (const Side side : kEverySide) silence(side);
}

void Connections::remove(Pending& table) noexcept {
  tables_.erase(std::find(tables_.begin(), tables_.end(), &table));
}

}  // namespace hvd::ucx
