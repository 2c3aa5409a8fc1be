#include "engine/point_to_point.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backend/backend.h"
#include "base/expect.h"
#include "base/log.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

/// Limit of the eager bytes that may wait at one rank for their recvs. Messages beyond it wait in
/// the sender's memory.
constexpr std::size_t kMaxEagerBytes = std::size_t{64} << 10;
/// Pieces that may be on their way to one rank, in total 1 MiB as in a call of a backend. Other
/// messages to that rank queue behind them.
constexpr int kPiecesUnderWay = static_cast<int>(kBytesPerCall / wire::kPieceBytes);
/// How long a recv waits before this rank sends Awaiting to the possible senders. Most recvs are
/// matched by then and cost no message.
constexpr Duration kShortWait = std::chrono::milliseconds(250);
constexpr std::size_t kMaxShown = 3;
/// Time between two polls of the device.
constexpr Duration kDeviceCheckInterval = std::chrono::microseconds(20);
/// From this size on, a tensor would not fit into the caches, so it is written past them.
constexpr std::size_t kStreamedBytes = std::size_t{8} << 20;
/// Limit of a rank's windows, of 1 MiB each. Further ranks of its host send without one.
constexpr std::size_t kMaxWindows = 32;
static_assert(kPiecesUnderWay <= static_cast<int>(MessageWindow::kSlots),
              "a slot is free when its piece is confirmed");

std::span<std::byte> memory_of(const OperationState& operation) {
  const TensorView& tensor = operation.submission.output;
  return {tensor.data, tensor.bytes()};
}

}  // namespace

PointToPoint::PointToPoint(const RuntimeOptions& options, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      sender_(parts_.control, parts_.counters),
      rank_(parts_.control.rank()) {}

void PointToPoint::begin(const OperationPtr& operation, TimePoint now) {
  HVD_EXPECT(operation->message != nullptr, "the operation is a send or recv");
  const int set = operation->message->key.process_set;
  if (!parts_.negotiator.process_sets().contains(set)) {
    return parts_.finish(operation,
                         {StatusCode::kUsage, text(operation->title(), ": there is no process set ",
                                                   set, "; was it removed?")},
                         nullptr);
  }
  operation->message->sends() ? begin_send(operation, now) : begin_recv(operation, now);
}

// --- the sender ---

void PointToPoint::begin_send(const OperationPtr& operation, TimePoint now) {
  const TensorView& tensor = operation->submission.input;
  const MessageSide& side = *operation->message;
  const std::size_t bytes = tensor.bytes();
  std::size_t& under_way = eager_under_way_[side.peer];
  auto device = transfer_of(tensor, *operation);
  const bool eager = !device && bytes <= wire::kEagerBytes && under_way + bytes <= kMaxEagerBytes;
  if (eager) under_way += bytes;
  const std::uint64_t id = next_id_++;
  Send& started =
      sends_[id] = {.operation = operation, .begun = now, .bytes = bytes, .eager = eager};
  started.device = std::move(device);
  wire::Offer offer{.send = id,
                    .key = side.key,
                    .dtype = tensor.dtype,
                    .elements = static_cast<std::uint64_t>(tensor.count),
                    .eager = eager};
  if (eager) offer.payload = {tensor.data, bytes};
  sender_.send_lazily(side.peer, wire::encode(offer));
  check_wait(id, started, now);
}

void PointToPoint::on(int source, const wire::Received& received) {
  const auto found = sends_.find(received.send);
  if (found == sends_.end()) return;  // it has ended with its process set
  Send& sent = found->second;
  const bool first = !std::exchange(sent.accepted, true);
  const bool fits = received.bytes <= sent.bytes && (sent.eager || received.bytes <= sent.sent);
  if (!fits || (sent.eager && received.bytes != sent.bytes))
    refuse_message(source,
                   text("has received ", received.bytes, " bytes of a send of ", sent.bytes));
  if (sent.eager) return finish(found, {});
  Stream& stream = streams_[source];
  if (first) stream.sends.push_back(received.send);
  if (received.bytes > 0) --stream.pieces_under_way;
  if (received.bytes == sent.bytes) finish(found, {});
}

void PointToPoint::on(int /*source*/, const wire::Refusal& refusal) {
  const auto found = sends_.find(refusal.send);
  if (found == sends_.end()) return;
  Status cause = refusal.cause;
  if (cause.code == StatusCode::kStalled)
    cause.message += text("; rank ", rank_, " ", state_text());
  finish(found, cause);
}

void PointToPoint::on(int source, const wire::Window&) {
  const std::string name = window_name(rank_, source);
  if (name.empty()) refuse_message(source, "offers memory that it does not share");
  streams_[source].window = MessageWindow::attach(name);
}

std::string PointToPoint::window_name(int source, int destination) const {
  const int other = source == rank_ ? destination : source;
  const std::string prefix = parts_.control.shared_memory_prefix(other);
  return prefix.empty() ? prefix : text(prefix, "-message-", source, "-", destination);
}

bool PointToPoint::send_pieces() {
  std::size_t sent = 0;
  // Begins after the rank that was served last, so that all streams are served in turn.
  auto next = streams_.upper_bound(last_stream_);
  for (std::size_t polls = streams_.size(); polls > 0 && sent < kBytesPerCall; --polls, ++next) {
    if (next == streams_.end()) next = streams_.begin();
    last_stream_ = next->first;
    while (sent < kBytesPerCall && send_piece(next->first, next->second)) sent += wire::kPieceBytes;
  }
  return sent > 0;
}

bool PointToPoint::send_piece(int peer, Stream& stream) {
  if (stream.pieces_under_way >= kPiecesUnderWay) return false;
  // A message from the GPU may have to wait for work that later messages make possible.
  std::span<const std::byte> piece;
  const auto next = std::ranges::find_if(stream.sends, [&](std::uint64_t id) {
    piece = next_piece(sends_.at(id));
    return !piece.empty();
  });
  if (next == stream.sends.end()) return false;
  const std::uint64_t id = *next;
  Send& current = sends_.at(id);
  if (stream.window) {
    stream.window->write(piece);
    send(peer, wire::SharedPiece{id, current.sent, piece.size()});
  } else {
    send(peer, wire::Piece{id, current.sent, piece});
  }
  current.sent += piece.size();
  if (current.device) current.device->release_piece();
  ++stream.pieces_under_way;
  if (current.sent == current.bytes) stream.sends.erase(next);
  return true;
}

void PointToPoint::release_eager_bytes(const Send& sent) {
  if (sent.eager) eager_under_way_[sent.operation->message->peer] -= sent.bytes;
}

// --- the receiver ---

void PointToPoint::begin_recv(const OperationPtr& operation, TimePoint now) {
  const MessageSide& side = *operation->message;
  const std::uint64_t id = next_id_++;
  Recv& started = recvs_[id] = {.operation = operation, .begun = now};
  started.device = transfer_of(operation->submission.output, *operation);
  auto delivery = mailboxes_.post(id, side.key, side.peer);
  if (const auto* const arrival = std::get_if<control::Arrival>(&delivery))
    return match(id, *arrival);
  if (const auto* const error = std::get_if<Status>(&delivery))
    return finish(recvs_.find(id), *error);
  if (end_if_all_left(id)) return;
  check_wait(id, started, now);
  update_wakeups();
}

void PointToPoint::update_wakeups() noexcept {
  const bool awaits = leaving_ || recvs_.size() > transfers_.size();
  if (std::exchange(awaits_offers_, awaits) != awaits) parts_.control.await_lazy_messages(awaits);
}

void PointToPoint::on(int source, const wire::Offer& offer) {
  const std::uint64_t send_id = offer.send;
  auto reception = mailboxes_.arrive(control::Arrival(source, offer));
  if (const auto* const recv = std::get_if<std::uint64_t>(&reception)) {
    control::Arrival arrival;
    arrival.source = source;
    arrival.offer = offer;
    return match(*recv, arrival);
  }
  if (const auto* const error = std::get_if<Status>(&reception))
    return send(source, wire::Refusal{send_id, *error});
  if (leaving_ && mailboxes_.withdraw(source, send_id))
    refuse(source, offer, StatusCode::kShutdown, "has called shutdown() without receiving it");
}

void PointToPoint::refuse(int source, const wire::Offer& offer, StatusCode code,
                          const std::string& problem) {
  send(source, wire::Refusal{offer.send,
                             {code, text("send (", wire::describe(offer.key), ") from rank ",
                                         source, ": rank ", rank_, " ", problem)}});
}

void PointToPoint::match(std::uint64_t id, const control::Arrival& arrival) {
  const auto found = recvs_.find(id);
  Recv& recv = found->second;
  const wire::Offer& offer = arrival.offer;
  const TensorView& tensor = recv.operation->submission.output;
  const std::span<std::byte> memory = memory_of(*recv.operation);
  if (offer.dtype != tensor.dtype || offer.elements != static_cast<std::uint64_t>(tensor.count)) {
    const Status error{
        StatusCode::kMismatch,
        text("message (", wire::describe(offer.key), ") from rank ", arrival.source, " to rank ",
             rank_, ": rank ", arrival.source, " sends ", offer.elements, " elements of ",
             offer.dtype, ", rank ", rank_, " expects ", tensor.count, " of ", tensor.dtype,
             "; pass tensors of the same dtype and number of elements")};
    send(arrival.source, wire::Refusal{offer.send, error});
    return finish(found, error);
  }
  recv.operation->set_result(arrival.source);
  if (offer.eager && !recv.device) {
    if (!memory.empty()) std::memcpy(memory.data(), offer.payload.data(), memory.size());
    send(arrival.source, wire::Received{offer.send, memory.size()});
    return finish(found, {});
  }
  recv.matched = true;
  recv.source = arrival.source;
  recv.bytes = memory.size();
  recv.send = offer.send;
  transfers_[{arrival.source, offer.send}] = id;
  update_wakeups();
  if (recv.device) {
    recv.payload.assign(offer.payload.begin(), offer.payload.end());
    device_recvs_.insert(id);  // advance_device() accepts it
    return;
  }
  offer_window(arrival.source);
  send(arrival.source, wire::Received{offer.send, 0});
}

PointToPoint::Recv& PointToPoint::expect_piece(int source, std::uint64_t send, std::uint64_t offset,
                                               std::uint64_t bytes) {
  const auto transfer = transfers_.find({source, send});
  if (transfer == transfers_.end()) refuse_message(source, "sends bytes that were not accepted");
  Recv& recv = recvs_.at(transfer->second);
  const std::size_t expected =
      recv.received + (recv.device ? recv.device->bytes_under_way() : std::size_t{0});
  if (offset != expected || bytes > recv.bytes - expected)
    refuse_message(source, text("sends bytes from ", offset, " on, expected ", expected));
  return recv;
}

void PointToPoint::confirm_piece(int source, std::uint64_t send_id, std::size_t bytes) {
  const auto transfer = transfers_.find({source, send_id});
  const auto found = recvs_.find(transfer->second);
  Recv& recv = found->second;
  recv.received += bytes;
  send(source, wire::Received{send_id, recv.received});
  if (recv.received < recv.bytes) return;
  transfers_.erase(transfer);
  finish(found, {});
}

void PointToPoint::on(int source, const wire::Piece& piece) {
  Recv& recv = expect_piece(source, piece.send, piece.offset, piece.bytes.size());
  const std::span<std::byte> memory =
      recv.device ? slot_of(source, recv, piece.bytes.size())
                  : memory_of(*recv.operation).subspan(piece.offset, piece.bytes.size());
  std::memcpy(memory.data(), piece.bytes.data(), piece.bytes.size());
  // The sender could not open the window, whose name it gets before it sends the first piece.
  if (const auto window = windows_.find(source); window != windows_.end()) window->second.reset();
  if (recv.device) return recv.device->copy_to_device(piece.bytes.size());
  confirm_piece(source, piece.send, piece.bytes.size());
}

void PointToPoint::on(int source, const wire::SharedPiece& piece) {
  const auto window = windows_.find(source);
  if (window == windows_.end() || !window->second)
    refuse_message(source, "sends bytes through memory that it does not share");
  Recv& recv = expect_piece(source, piece.send, piece.offset, piece.bytes);
  if (recv.device) {
    window->second->read(slot_of(source, recv, piece.bytes), /*streams=*/false);
    return recv.device->copy_to_device(piece.bytes);
  }
  window->second->read(memory_of(*recv.operation).subspan(piece.offset, piece.bytes),
                       /*streams=*/recv.bytes >= kStreamedBytes);
  confirm_piece(source, piece.send, piece.bytes);
}

void PointToPoint::offer_window(int source) {
  if (windows_.size() >= kMaxWindows) return;
  const std::string name = window_name(source, rank_);
  if (name.empty()) return;
  const auto [made, added] = windows_.try_emplace(source);
  if (!added) return;
  try {
    made->second = MessageWindow::create(name);
    send(source, wire::Window{});
  } catch (const Error& error) {
    HVD_LOG(kDebug) << "messages from rank " << source
                    << " are received without shared memory: " << error.what();
  }
}

void PointToPoint::on(int source, const wire::Recall& recall) {
  const wire::Offer* const offer = mailboxes_.find(source, recall.send);
  if (offer == nullptr) return;  // it has been answered, and the answer is on its way
  const Status error{
      StatusCode::kStalled,
      text("send (", wire::describe(offer->key), ") from rank ", source, " to rank ", rank_,
           ": no recv has matched it for too long (Options::stall_shutdown, HVD_STALL_SHUTDOWN); "
           "use the same process set and the same tag or name in both calls; rank ",
           rank_, " ", state_text())};
  mailboxes_.recall(source, recall.send, error);
  send(source, wire::Refusal{recall.send, error});
}

void PointToPoint::on(int source, const wire::Withdrawal& withdrawal) {
  if (mailboxes_.withdraw(source, withdrawal.send)) return;
  const auto transfer = transfers_.find({source, withdrawal.send});
  if (transfer == transfers_.end()) return;
  const auto found = recvs_.find(transfer->second);
  transfers_.erase(transfer);
  finish(found, withdrawal.cause);
}

// --- long waits ---

void PointToPoint::on(int source, const wire::Awaiting&) {
  awaited_by_.add(RankSet(source));
  if (leaving_) send(source, wire::Leaving{});
}

void PointToPoint::on(int source, const wire::Leaving&) {
  left_.add(RankSet(source));
  std::vector<std::uint64_t> ids;
  for (const auto& [id, recv] : recvs_) ids.push_back(id);
  for (const std::uint64_t id : ids)
    if (!end_if_all_left(id)) end_if_answered(id);
}

bool PointToPoint::end_if_all_left(std::uint64_t id) {
  const auto found = recvs_.find(id);
  const Recv& recv = found->second;
  if (recv.matched) return false;
  const RankSet sources = RankSet::of(sources_of(*recv.operation));
  if (!contains(left_, sources)) return false;
  mailboxes_.remove(id, recv.operation->message->key);
  finish(found, {StatusCode::kShutdown,
                 text(recv.operation->title(), " on rank ", rank_, ": ", rank_list(sources),
                      " left the job by shutdown() and did not send it")});
  return true;
}

void PointToPoint::on(int source, const wire::Inquiry& inquiry) {
  send(source, wire::Answer{inquiry.recv, state_text()});
}

void PointToPoint::on(int source, const wire::Answer& answer) {
  const auto found = recvs_.find(answer.recv);
  if (found == recvs_.end()) return parts_.answered(answer.recv, source, answer.activity);
  if (found->second.wait != Wait::kEnding) return;
  Recv& recv = found->second;
  if (!contains(recv.unanswered, source)) return;
  recv.unanswered.remove(RankSet(source));
  if (recv.answers.size() < kMaxShown)
    recv.answers.push_back(text("rank ", source, " ", answer.activity));
  end_if_answered(answer.recv);
}

void PointToPoint::inquire(std::uint64_t id, Recv& recv) {
  recv.unanswered = RankSet::of(sources_of(*recv.operation));
  recv.unanswered.remove(left_);
  for (const int source : recv.unanswered.to_vector()) send(source, wire::Inquiry{id});
}

RankSet PointToPoint::other_sides(const OperationState& operation) const {
  const auto is_it = [&](const auto& entry) { return &*entry.second.operation == &operation; };
  if (operation.message->sends()) {
    const auto found = std::ranges::find_if(sends_, is_it);
    return found == sends_.end() || found->second.accepted ? RankSet()
                                                           : RankSet(operation.message->peer);
  }
  const auto found = std::ranges::find_if(recvs_, is_it);
  return found == recvs_.end() || found->second.matched ? RankSet()
                                                        : RankSet::of(sources_of(operation));
}

std::uint64_t PointToPoint::inquire(RankSpan ranks) {
  const std::uint64_t id = next_id_++;
  for_each_rank(ranks, [&](int rank) { send(rank, wire::Inquiry{id}); });
  return id;
}

bool PointToPoint::end_if_answered(std::uint64_t id) {
  const auto found = recvs_.find(id);
  Recv& recv = found->second;
  recv.unanswered.remove(left_);
  if (recv.matched || recv.wait != Wait::kEnding || !recv.unanswered.empty()) return false;
  const Status error{
      StatusCode::kStalled,
      text(recv.operation->title(), " on rank ", rank_,
           ": no send has matched it for too long (Options::stall_shutdown, HVD_STALL_SHUTDOWN); "
           "use the same process set and the same tag or name in both calls; rank ",
           rank_, " ", state_text(), recv.answers.empty() ? "" : "; ",
           join_text(recv.answers, "; "))};
  mailboxes_.stall(id, recv.operation->message->key, error);
  finish(found, error);
  return true;
}

bool PointToPoint::reaches(Wait& wait, Wait step, Duration after, TimePoint begun, TimePoint now) {
  if (wait >= step || after == Duration::zero()) return false;
  const TimePoint due = begun + after;
  if (now >= due) {
    wait = step;
    return true;
  }
  deadline_ = deadline_ ? std::min(*deadline_, due) : due;
  return false;
}

void PointToPoint::check_wait(std::uint64_t id, Send& sent, TimePoint now) {
  if (sent.accepted) return;
  if (reaches(sent.wait, Wait::kWarned, options_.stall_warning, sent.begun, now))
    warn(*sent.operation, now - sent.begun);
  if (reaches(sent.wait, Wait::kEnding, options_.stall_shutdown, sent.begun, now))
    send(sent.operation->message->peer, wire::Recall{id});
}

void PointToPoint::check_wait(std::uint64_t id, Recv& recv, TimePoint now) {
  if (recv.matched) return;
  if (reaches(recv.wait, Wait::kAnnounced, kShortWait, recv.begun, now)) {
    RankSet sources = RankSet::of(sources_of(*recv.operation));
    sources.remove(awaited_);
    for (const int source : sources.to_vector()) send(source, wire::Awaiting{});
    awaited_.add(sources);
  }
  if (reaches(recv.wait, Wait::kWarned, options_.stall_warning, recv.begun, now))
    warn(*recv.operation, now - recv.begun);
  if (reaches(recv.wait, Wait::kEnding, options_.stall_shutdown, recv.begun, now))
    inquire(id, recv);
}

void PointToPoint::warn(const OperationState& operation, Duration waited) {
  parts_.counters.stalls.add(1);
  HVD_LOG(kWarning) << operation.title() << " on rank " << rank_ << " has waited " << text(waited)
                    << ": the other side has not called "
                    << (operation.message->sends() ? "recv" : "send") << " for it";
}

bool PointToPoint::check_waits(TimePoint now) {
  if (!deadline_ || now < *deadline_) return false;
  deadline_.reset();
  for (auto& [id, sent] : sends_) check_wait(id, sent, now);
  std::vector<std::uint64_t> ids;
  for (auto& [id, recv] : recvs_) {
    check_wait(id, recv, now);
    if (recv.wait == Wait::kEnding) ids.push_back(id);
  }
  bool ended = false;
  for (const std::uint64_t id : ids) ended = end_if_answered(id) || ended;
  return ended;
}

// --- dispatch ---

void PointToPoint::handle(int source, const wire::PointMessage& message) {
  std::visit([&](const auto& step) { on(source, step); }, message);
}

bool PointToPoint::progress(TimePoint now) {
  awaits_device_ = false;
  bool moved = send_pieces();
  moved = advance_device() || moved;
  next_device_check_ = awaits_device_ ? std::optional(now + kDeviceCheckInterval) : std::nullopt;
  check_device(moved, now);
  return check_waits(now) || moved;
}

std::optional<TimePoint> PointToPoint::deadline() const noexcept {
  return next_device_check_ && deadline_ ? std::min(next_device_check_, deadline_)
         : next_device_check_            ? next_device_check_
                                         : deadline_;
}

bool PointToPoint::leave() {
  if (std::exchange(leaving_, true)) return false;
  update_wakeups();
  std::vector<std::pair<int, wire::Offer>> offers;
  mailboxes_.for_each_offer(
      [&](int source, const wire::Offer& offer) { offers.emplace_back(source, offer); });
  for (const auto& [source, offer] : offers) {
    refuse(source, offer, StatusCode::kShutdown, "has called shutdown() without receiving it");
    mailboxes_.withdraw(source, offer.send);
  }
  for (const int rank : awaited_by_.to_vector()) send(rank, wire::Leaving{});
  return true;
}

void PointToPoint::remove_set(int process_set) {
  const auto removed = [&](const OperationState& operation) {
    return operation.message->key.process_set == process_set;
  };
  const auto error_of = [&](const OperationState& operation) {
    return Status{StatusCode::kUsage, text(operation.title(), " on rank ", rank_,
                                           ": the process set was removed while it waited")};
  };
  for (auto next = sends_.begin(); next != sends_.end();) {
    const auto current = next++;
    const Send& sent = current->second;
    if (sent.accepted || !removed(*sent.operation)) continue;
    const Status error = error_of(*sent.operation);
    send(sent.operation->message->peer, wire::Withdrawal{current->first, error});
    finish(current, error);
  }
  for (auto next = recvs_.begin(); next != recvs_.end();) {
    const auto current = next++;
    const Recv& recv = current->second;
    if (recv.matched || !removed(*recv.operation)) continue;
    mailboxes_.remove(current->first, recv.operation->message->key);
    finish(current, error_of(*recv.operation));
  }
}

void PointToPoint::finish(Sends::iterator sent, const Status& status) {
  release_eager_bytes(sent->second);
  const OperationPtr operation = std::move(sent->second.operation);
  const auto device = std::move(sent->second.device);
  sends_.erase(sent);
  finish(operation, device, status);
}

void PointToPoint::finish(Recvs::iterator recv, const Status& status) {
  device_recvs_.erase(recv->first);
  const OperationPtr operation = std::move(recv->second.operation);
  const auto device = std::move(recv->second.device);
  recvs_.erase(recv);
  update_wakeups();
  finish(operation, device, status);
}

std::vector<OperationPtr> PointToPoint::release_all() {
  std::vector<OperationPtr> all;
  for (const auto& [operation, state] : outstanding()) all.push_back(operation);
  for (const auto& [id, sent] : sends_) keep_memory(sent.operation, sent.device);
  for (const auto& [id, recv] : recvs_) keep_memory(recv.operation, recv.device);
  device_recvs_.clear();
  next_device_check_.reset();
  sends_.clear();
  recvs_.clear();
  transfers_.clear();
  streams_.clear();
  windows_.clear();
  eager_under_way_.clear();
  mailboxes_ = {};
  deadline_.reset();
  return all;
}

std::vector<std::pair<OperationPtr, std::string>> PointToPoint::outstanding() const {
  std::vector<std::pair<OperationPtr, std::string>> all;
  for (const auto& [id, sent] : sends_)
    all.emplace_back(sent.operation, sent.accepted
                                         ? text("sent ", sent.sent, " of ", sent.bytes, " bytes")
                                         : "waits for its recv");
  for (const auto& [id, recv] : recvs_)
    all.emplace_back(recv.operation,
                     recv.matched ? text("received ", recv.received, " of ", recv.bytes, " bytes")
                                  : "waits for its send");
  return all;
}

std::vector<int> PointToPoint::sources_of(const OperationState& recv) const {
  const MessageSide& side = *recv.message;
  if (side.peer != control::kAnyRank) return {side.peer};
  std::vector<int> members = parts_.negotiator.process_sets().ranks(side.key.process_set);
  std::erase(members, rank_);
  return members;
}

std::string PointToPoint::state_text() const {
  std::vector<std::string> titles;
  if (const std::string activity = parts_.activity(); !activity.empty()) titles.push_back(activity);
  std::size_t hidden = 0;
  for (const auto& [operation, state] : outstanding())
    titles.size() < kMaxShown ? titles.push_back(operation->title()) : void(++hidden);
  if (hidden > 0) titles.push_back(text(hidden, " more operations"));
  if (!titles.empty()) return text("waits for ", join_text(titles, ", ", " and "));
  return leaving_ ? "has called shutdown()" : "has no operation outstanding";
}

void PointToPoint::refuse_message(int source, const std::string& problem) const {
  throw Error(text("rank ", rank_, " received an impossible message: rank ", source, " ", problem,
                   "; run the same build of hvd on every rank"));
}

}  // namespace hvd::runtime
