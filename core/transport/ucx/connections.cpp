#include "transport/ucx/connections.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/expect.h"
#include "base/log.h"
#include "base/process_exit.h"
#include "base/sha256.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/control_plane.h"

// Note [Connections go one way]
// If two ranks connect to each other at the same time, UCX merges the two connections into one. If
// one rank ends at that moment, an assertion in UCX 1.13 may end the other too. Therefore no two
// workers ever connect to each other, and no data is sent on an incomplete connection:
//
// - A rank has a sending and a receiving worker for each plane. The sender connects its sending
//   worker to the receiver's receiving worker, and does not need the receiver to connect back.
// - The first message of a connection is a Hello. The receiver then makes its own endpoint, for
//   which UCX uses the existing connection. It needs the endpoint to detect the sender's end and to
//   answer. Once the answer has arrived, both ends are complete, and waiting messages are sent.
// - UCX distinguishes the connections between two workers by counting them, so there is only one. A
//   broken connection stays broken until a new generation has new workers.
//
// A receiving worker without a message to receive gets no progress calls, for example in repeated
// steps.

// Note [Proofs of Hellos]
// UCX accepts connections from any process that reaches its port. A Hello therefore contains a
// proof that its sender has the key of the job: an HMAC of the generation, the ranks, the receiving
// worker and whether the sender leaves. A Hello without a valid proof has no effect, so no other
// process can take the place of a rank. Other messages have no proof, and messages are not
// encrypted: the network must be private (launching.md).

// Note [Primers]
// UCX stores messages that arrive before their receive is posted in its own memory. All messages of
// the control plane arrive this way. When the first message of a size class arrives, UCX allocates
// room for 128 messages and touches every page. The report and the plan of the first step (2 KiB
// each for 161 tensors) each took 0.2 to 0.3 ms longer. Therefore a rank that connects in advance
// sends a message of each size class after its Hello, and the receiver drops these messages.

// Note [Detecting the end of a rank]
// UCX detects the end of a process at once, because the kernel closes its connections. Receives of
// the control plane accept any source, so no receive fails when one connection breaks. The
// connections are therefore checked separately. A rank that leaves in order sends a farewell on the
// connections that it has made before it closes any of them. Messages stay in order, so a
// connection that breaks without a farewell means a loss. The connection in the other direction may
// break before the farewell arrives. Its break counts as a loss only if the other rank has not
// answered yet.

// Note [A worker that is not ended]
// UCX 1.13 has assertions that are always on. Closing connections by force while messages are under
// way violates them, here and in the peer: 6 of 248 live processes ended when others cancelled
// large messages. Another assertion ends a process that destroys a worker while an answer to a
// peer's first message waits for that peer, which may be stopped. So after a failure no connection
// is closed: the worker makes no more progress and is kept until the process ends, see Note [Memory
// after a failure]. Over TCP the workers of sender and receiver move all bytes of a message, so no
// memory is read or written once they make no progress, and no peer receives later contents of that
// memory as the message. Peers are informed of a failure through the control plane.
//
// In an elastic job the connections are closed when all ranks have left the generation
// (take_kept()), so that no live peer makes progress on them. The memory of the messages may be
// gone by then, so the worker is destroyed without further progress. Endpoints are closed by force
// first, because UCX asserts that a worker which is destroyed has no pending requests.

namespace hvd::ucx {
namespace {

/// How long leave() waits for messages that are still being sent.
constexpr auto kFlushTime = std::chrono::milliseconds(500);
/// How long leave() waits for connections closed by force: usually microseconds.
constexpr auto kForceTime = std::chrono::milliseconds(100);

/// Limit of consecutive progress calls to a worker that always has work to do.
constexpr int kMaxRounds = 100;

/// While no message is being sent, only one of this many calls makes progress on the sending
/// worker.
constexpr unsigned kIdleCallsPerProgress = 8;

/// The sizes that make UCX allocate memory for 2 and 4 KiB (UCX_RX_MPOOL_SIZES).
constexpr std::size_t kPrimerBytes[] = {1500, 3000};

constexpr message::Plane kEveryPlane[] = {message::Plane::kControl, message::Plane::kData};
constexpr Side kEverySide[] = {Side::kControlIn, Side::kControlOut, Side::kDataIn, Side::kDataOut};

constexpr message::Plane plane_of(Side side) noexcept {
  return side == Side::kControlIn || side == Side::kControlOut ? message::Plane::kControl
                                                               : message::Plane::kData;
}

JobMembers checked(JobMembers members) {
  const std::size_t size = members.addresses.size();
  if (size > static_cast<std::size_t>(message::kMaxRanks)) {
    throw Error(
        text("ucx: a job of ", size, " ranks; message tags have room for ", message::kMaxRanks));
  }
  if (members.generation >> message::kGenerationBits != 0) {
    throw Error(text("ucx: generation ", members.generation, " has no room in message tags"));
  }
  for (const auto& address : members.addresses) static_cast<void>(part_of(address, Side::kDataOut));
  return members;
}

/// A worker that makes no more progress, and the memory to which it may write.
class StoppedWorker {
 public:
  StoppedWorker(std::shared_ptr<const void> memory, std::vector<Endpoint> endpoints,
                std::unique_ptr<Worker> worker)
      : memory_(std::move(memory)), endpoints_(std::move(endpoints)), worker_(std::move(worker)) {}
  StoppedWorker(const StoppedWorker&) = delete;
  StoppedWorker& operator=(const StoppedWorker&) = delete;
  /// Runs when no peer makes progress on these connections any more: see Note [A worker that is not
  /// ended].
  ~StoppedWorker() {
    for (const Endpoint endpoint : endpoints_) worker_->close(endpoint, CloseMode::kForce);
    worker_.reset();
  }

 private:
  const std::shared_ptr<const void> memory_;
  const std::vector<Endpoint> endpoints_;
  std::unique_ptr<Worker> worker_;
};

template <typename Value>
std::span<const std::byte> bytes_of(const Value& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof value};
}

}  // namespace

// Each part is its size in four bytes, followed by its bytes. The ranks have already checked that
// they run the same build.
std::vector<std::byte> Workers::address() const {
  std::vector<std::byte> whole;
  for (const auto& worker : of) {
    const std::vector<std::byte> part = worker->address();
    const auto bytes = static_cast<std::uint32_t>(part.size());
    const auto* const first = reinterpret_cast<const std::byte*>(&bytes);
    whole.insert(whole.end(), first, first + sizeof bytes);
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

std::span<const std::byte> part_of(std::span<const std::byte> whole, Side side) {
  for (std::size_t before = static_cast<std::size_t>(side);; --before) {
    std::uint32_t bytes = 0;
    if (whole.size() < sizeof bytes) break;
    std::memcpy(&bytes, whole.data(), sizeof bytes);
    whole = whole.subspan(sizeof bytes);
    if (whole.size() < bytes) break;
    if (before == 0) return whole.first(bytes);
    whole = whole.subspan(bytes);
  }
  throw Error(
      "ucx: a rank's address is too short; do all ranks run the same build with the same "
      "settings?");
}

Hello make_hello(const JobMembers& members, int from, int to, Side to_side, bool leaves) {
  Hello hello{.rank = from, .leaves = leaves ? 1 : 0};
  const std::string proof =
      hmac_hex(members.key, text("hello ", members.generation, " ", from, " ", to, " ",
                                 static_cast<int>(to_side), " ", hello.leaves));
  proof.copy(hello.proof, sizeof hello.proof);
  return hello;
}

Connections::Connections(Workers workers, JobMembers members)
    : members_(checked(std::move(members))),
      primer_(std::ranges::max(kPrimerBytes)),
      dropped_primer_(primer_.size()),
      stopping_releases_memory_(workers.only_workers_touch_memory),
      interface_(workers.interface),
      links_{std::vector<Link>(members_.addresses.size()),
             std::vector<Link>(members_.addresses.size())} {
  for (const Side side : kEverySide) {
    at(side).worker = std::move(workers.of[static_cast<std::size_t>(side)]);
    receive_hello(side);
  }
}

Worker& Connections::worker(Side side) {
  if (ended(side)) throw Error("ucx: the connections to the other ranks have been closed");
  return *at(side).worker;
}

// Without a free descriptor UCX cannot accept a connection. No call returns an error in that case,
// and the peer would wait forever.
void Connections::require_resources(Status error) const {
  for (const Side side : kEverySide) {
    if (ended(side)) continue;
    const std::string shortage = at(side).worker->take_resource_exhaustion(error);
    if (!shortage.empty())
      throw Error(text("ucx: rank ", members_.rank, " has reached a limit: ", shortage));
    return;
  }
}

void Connections::raise(const char* what, int peer, Status status) const {
  require_resources(status);
  std::string cause = "the connections to the other ranks have been closed";
  for (const Side side : kEverySide) {
    if (ended(side)) continue;
    cause = at(side).worker->describe(status);
    break;
  }
  const std::string where = interface_.empty() ? "" : " over " + interface_;
  throw BrokenConnection(text("ucx: ", what, " rank ", peer, where, " failed: ", cause), peer);
}

message::Tag Connections::hello_tag() const noexcept {
  return message::make_tag({.generation = members_.generation, .kind = message::kHelloKind});
}

message::Tag Connections::primer_tag() const noexcept {
  return message::make_tag({.generation = members_.generation, .kind = message::kPrimerKind});
}

void Connections::receive_hello(Side side) {
  WorkerState& state = at(side);
  state.hello_receive =
      state.worker
          ->receive({reinterpret_cast<std::byte*>(&state.hello), sizeof state.hello}, hello_tag())
          .request;
}

bool Connections::run(Side side) {
  const bool moved = worker(side).progress();
  if (moved) handle_hellos(side);
  if (moved && side == Side::kControlIn) drop_primers();
  free_sent_hellos(side);
  return moved;
}

void Connections::handle_hellos(Side side) {
  WorkerState& state = at(side);
  while (state.hello_receive != nullptr) {
    std::size_t bytes = 0;
    const Status status = state.worker->status_of_receive(state.hello_receive, bytes);
    if (status == kInProgress) return;
    state.worker->free(std::exchange(state.hello_receive, nullptr));
    const Hello hello = state.hello;
    receive_hello(side);
    if (status != kOk || bytes != sizeof hello || !proves_itself(hello, side)) continue;
    const message::Plane plane = plane_of(side);
    if (hello.leaves != 0) {
      links_of(plane)[index(hello.rank)].left = true;
    } else if (side == out_of(plane)) {
      complete_connection(plane, hello.rank);
    } else {
      accept_connection(plane, hello.rank);
    }
  }
}

void Connections::free_sent_hellos(Side side) {
  WorkerState& state = at(side);
  std::erase_if(state.hello_sends, [&](void* request) {
    if (state.worker->status_of_send(request) == kInProgress) return false;
    state.worker->free(request);
    return true;
  });
}

bool Connections::proves_itself(const Hello& hello, Side own) {
  if (hello.rank >= 0 && index(hello.rank) < members_.addresses.size()) {
    const Hello expected = make_hello(members_, hello.rank, members_.rank, own, hello.leaves != 0);
    if (same_secret({hello.proof, sizeof hello.proof}, {expected.proof, sizeof expected.proof}))
      return true;
  }
  if (!std::exchange(stranger_logged_, true)) {
    HVD_LOG(kWarning) << "ucx: a connection that claims to come from rank " << hello.rank
                      << " does not prove that it belongs to this job; it is ignored, and so are "
                         "further ones; find out which other program reaches this host's ports";
  }
  return false;
}

void Connections::complete_connection(message::Plane plane, int peer) {
  Link& link = links_of(plane)[index(peer)];
  if (link.out.failure != kOk) return;  // advance() fails the waiting messages
  link.answered = true;
  for (Outgoing* const message : std::exchange(link.waiting, {})) start(plane, link, *message);
}

void Connections::accept_connection(message::Plane plane, int peer) {
  OneWayConnection& in = links_of(plane)[index(peer)].in;
  if (in.endpoint.handle == nullptr && in.failure == kOk)
    connect(in_of(plane), out_of(plane), peer, in);
}

void Connections::require_all_connected(const std::function<bool(int)>& concerns) {
  require_resources(kOk);
  for (const int peer : connected_) {
    const Link& link = links_of(message::Plane::kControl)[index(peer)];
    if (!lost(link) || !concerns(peer)) continue;
    // A farewell may have arrived on one connection after the last progress call, and before the
    // break of the other connection was detected.
    for (int round = 0; round < kMaxRounds && run(Side::kControlIn); ++round) {
    }
    if (lost(link)) {
      raise("the connection with", peer,
            link.in.failure != kOk ? link.in.failure : link.out.failure);
    }
  }
}

/// Includes incomplete connections, because the other rank may be about to answer.
void Connections::send_farewells() noexcept {
  if (ended(Side::kControlOut)) return;
  Worker& out = *at(Side::kControlOut).worker;
  const auto& links = links_of(message::Plane::kControl);
  for (std::size_t peer = 0; peer < links.size(); ++peer) {
    const OneWayConnection& to = links[peer].out;
    if (to.endpoint.handle == nullptr || to.failure != kOk) continue;
    const Hello& farewell = sent_hellos_.emplace_back(
        make_hello(members_, members_.rank, static_cast<int>(peer), Side::kControlIn, true));
    const StartResult sent = out.send(to.endpoint, bytes_of(farewell), hello_tag());
    if (sent.request != nullptr) out.free(sent.request);
  }
}

/// Connects a worker of this rank to one of the peer, and sends a Hello. An error becomes the end's
/// failure.
void Connections::connect(Side own, Side of_peer, int peer, OneWayConnection& end) {
  if (plane_of(own) == message::Plane::kControl &&
      std::find(connected_.begin(), connected_.end(), peer) == connected_.end())
    connected_.push_back(peer);
  Worker& from = worker(own);
  const Status status =
      from.connect(part_of(members_.addresses[index(peer)], of_peer), &end.failure, end.endpoint);
  if (status != kOk) {
    end.failure = status;
    return;
  }
  const Hello& hello =
      sent_hellos_.emplace_back(make_hello(members_, members_.rank, peer, of_peer, false));
  const StartResult sent = from.send(end.endpoint, bytes_of(hello), hello_tag());
  if (sent.request != nullptr) {
    at(own).hello_sends.push_back(sent.request);
  } else if (sent.status != kOk) {
    end.failure = sent.status;
  }
}

void Connections::connect_ahead(message::Plane plane, int peer) {
  OneWayConnection& out = links_of(plane)[index(peer)].out;
  if (out.failure == kOk && out.endpoint.handle == nullptr) {
    connect(out_of(plane), in_of(plane), peer, out);
    if (plane == message::Plane::kControl && out.failure == kOk) send_primers(out);
  }
  ahead_.emplace_back(plane, peer);
}

/// Ignores errors, because the Hello reports them.
void Connections::send_primers(const OneWayConnection& end) {
  Worker& out = worker(Side::kControlOut);
  for (const std::size_t bytes : kPrimerBytes) {
    const StartResult sent = out.send(end.endpoint, std::span(primer_).first(bytes), primer_tag());
    if (sent.request != nullptr) out.free(sent.request);
  }
}

void Connections::drop_primers() {
  Worker& in = worker(Side::kControlIn);
  while (const auto found = in.probe(primer_tag(), ~message::Tag{0})) {
    const StartResult dropped = in.receive(dropped_primer_, found->message);
    if (dropped.request != nullptr) in.free(dropped.request);
  }
}

// A receiving worker sends its answers only while it makes progress, and that stops after the start
// of the job. If the rank stopped earlier, a peer would wait for the answer until this rank
// receives its first message.
bool Connections::connecting() const noexcept {
  if (std::ranges::any_of(kEverySide, [this](Side s) { return !at(s).hello_sends.empty(); }))
    return true;
  return std::any_of(ahead_.begin(), ahead_.end(), [this](const auto& begun) {
    const Link& link = links_of(begun.first)[index(begun.second)];
    const bool complete = link.answered && link.in.endpoint.handle != nullptr;
    return !complete && link.out.failure == kOk && link.in.failure == kOk;
  });
}

void Connections::send(message::Plane plane, int peer, Outgoing& message) {
  static_cast<void>(worker(out_of(plane)));
  HVD_EXPECT(message.stage == Outgoing::Stage::kOver, "the message is not under way");
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
  const StartResult started =
      worker(out_of(plane)).send(link.out.endpoint, message.bytes, message.tag);
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

void Connections::drop(message::Plane plane, int peer, Outgoing& message) noexcept {
  if (message.stage == Outgoing::Stage::kOver) return;
  if (message.stage == Outgoing::Stage::kWaiting)
    std::erase(links_of(plane)[index(peer)].waiting, &message);
  if (message.request != nullptr) at(out_of(plane)).worker->free(message.request);
  end(plane, message, kCancelled);
}

bool Connections::progress(message::Plane plane, bool receives) {
  const auto number = static_cast<std::size_t>(plane);
  // A message that UCX reports as sent may still wait for room in a socket, for which an occasional
  // progress call is enough.
  const bool due = sending_[number] > 0 || ++idle_calls_[number] % kIdleCallsPerProgress == 0;
  const bool moved = due && run(out_of(plane));
  return (receives && run(in_of(plane))) || moved;
}

void Connections::close(Side side, OneWayConnection& closed, CloseMode mode) noexcept {
  if (closed.endpoint.handle == nullptr) return;
  // A broken connection cannot be flushed.
  const CloseMode possible = closed.failure == kOk ? mode : CloseMode::kForce;
  const StartResult started = at(side).worker->close(std::exchange(closed.endpoint, {}), possible);
  if (started.request != nullptr) at(side).closing.push_back(started.request);
}

/// Returns false if an incomplete connection stays open.
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
  WorkerState& state = at(side);
  while (state.worker->progress()) {
  }
  std::erase_if(state.closing, [&](void* request) {
    if (state.worker->status_of_send(request) == kInProgress) return false;
    state.worker->free(request);
    return true;
  });
  return state.closing.empty();
}

bool Connections::all_closed() noexcept {
  bool all = true;
  for (const Side side : kEverySide) all = closed(side) && all;
  return all;
}

void Connections::drop_side(Side side) noexcept {
  for (MessageOwner* const owner : owners_) owner->drop(side);
  WorkerState& state = at(side);
  for (void* const request : state.closing) state.worker->free(request);
  state.closing.clear();
  for (void* const request : state.hello_sends) state.worker->free(request);
  state.hello_sends.clear();
  if (state.hello_receive != nullptr)
    state.worker->free(std::exchange(state.hello_receive, nullptr));
}

void Connections::leave() noexcept {
  send_farewells();
  if (std::any_of(std::begin(kEverySide), std::end(kEverySide),
                  [this](Side s) { return ended(s); }))
    return stop();
  // Other ranks that leave wait for this rank too. Their messages to this rank are not awaited.
  const bool complete = close_sends();
  const bool flushed =
      poll_until(std::chrono::steady_clock::now() + kFlushTime, [this] { return all_closed(); });
  if (!complete || !flushed) return stop();
  close_receives();
  if (!poll_until(std::chrono::steady_clock::now() + kForceTime, [this] { return all_closed(); }))
    return stop();
  for (const Side side : kEverySide) {
    drop_side(side);
    at(side).worker.reset();
  }
}

void Connections::stop(Side side) noexcept {
  if (ended(side)) return;
  drop_side(side);
  keep_until_exit(std::make_shared<StoppedWorker>(weak_from_this().lock(), endpoints(side),
                                                  std::move(at(side).worker)),
                  Kept::kTransport);
}

/// The open endpoints of a worker.
std::vector<Endpoint> Connections::endpoints(Side side) const {
  std::vector<Endpoint> open;
  const bool receives = side == in_of(plane_of(side));
  for (const Link& link : links_of(plane_of(side))) {
    const OneWayConnection& connection = receives ? link.in : link.out;
    if (connection.endpoint.handle != nullptr) open.push_back(connection.endpoint);
  }
  return open;
}

void Connections::stop() noexcept {
  for (const Side side : kEverySide) stop(side);
}

void Connections::remove(MessageOwner& owner) noexcept {
  owners_.erase(std::find(owners_.begin(), owners_.end(), &owner));
}

}  // namespace hvd::ucx
