#include "bootstrap/store_server.h"

#include <algorithm>
#include <string_view>

#include "base/sha256.h"
#include "base/text.h"

namespace hvd::rendezvous {
namespace {

/// Version of the protocol, so that a process with another version of hvd gets an appropriate
/// error.
constexpr std::string_view kFormat = "hvd store 3";
constexpr std::size_t kHelloFields = 6;
constexpr std::size_t kRequestFields = 6;
constexpr std::size_t kReplyFields = 3;

constexpr std::size_t kMaxKeys = 64;
constexpr std::size_t kMaxProcessBytes = 512;
constexpr std::size_t kMaxNonceBytes = 64;
/// Limit of the refused processes that remarks() can describe.
constexpr std::size_t kMaxForeign = 64;

/// A whole frame of a reply, whose last bytes are the value.
StoreServer::Frame reply_frame(std::string_view verdict, std::int64_t number = 0,
                               std::span<const std::byte> value = {}) {
  // The last field is written without a temporary copy, because values may be large.
  const Bytes head = join_fields({std::string(verdict), text(number)});
  const auto size = static_cast<std::uint32_t>(value.size());
  const auto all = static_cast<std::uint32_t>(head.size() + sizeof size + value.size());
  auto frame = std::make_shared<Bytes>();
  frame->reserve(sizeof all + all);
  for (const std::span<const std::byte> part :
       {std::as_bytes(std::span(&all, 1)), std::span<const std::byte>(head),
        std::as_bytes(std::span(&size, 1)), value})
    frame->insert(frame->end(), part.begin(), part.end());
  return frame;
}

}  // namespace

Bytes encode(const StoreHello& hello) {
  return join_fields({std::string(kFormat), hello.job, text(hello.rank), text(hello.size),
                      hello.process, hello.nonce});
}

std::optional<StoreHello> decode_store_hello(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, kHelloFields);
  if (!fields || (*fields)[0] != kFormat) return std::nullopt;
  const auto rank = parse_number<int>((*fields)[2]);
  const auto size = parse_number<int>((*fields)[3]);
  if (!rank || !size || *rank < 0 || *rank >= *size || *size > kMaxRanks) return std::nullopt;
  StoreHello hello{.job = (*fields)[1],
                   .rank = *rank,
                   .size = *size,
                   .process = (*fields)[4],
                   .nonce = (*fields)[5]};
  if (hello.job.size() > kMaxNameBytes || hello.process.size() > kMaxProcessBytes ||
      hello.nonce.size() > kMaxNonceBytes)
    return std::nullopt;
  return hello;
}

Bytes encode(const StoreRequest& request) {
  return join_fields({request.verb, request.key, request.value, request.once, request.also,
                      text(request.left.count())});
}

std::optional<StoreReply> decode_store_reply(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, kReplyFields);
  const auto number = fields ? parse_number<std::int64_t>((*fields)[1]) : std::nullopt;
  if (!number) return std::nullopt;
  return StoreReply{
      .verdict = std::move((*fields)[0]), .number = *number, .value = std::move((*fields)[2])};
}

std::string server_proof(const std::string& token, const StoreHello& hello,
                         const std::string& nonce) {
  return proof(token, {"store server", text_of(encode(hello)), nonce});
}

std::string client_proof(const std::string& token, const StoreHello& hello,
                         const std::string& nonce) {
  return proof(token, {"store client", text_of(encode(hello)), nonce});
}

void StoreServer::open(int id, Deadline now) {
  Session& session = sessions_[id];
  set_timer(id, session, now + kTimeToBeAdmitted);
  unadmitted_.insert(id);
  if (unadmitted_.size() > options_.max_unadmitted) end_oldest_unadmitted();
}

std::uint32_t StoreServer::frame_limit(int id) const {
  const auto found = sessions_.find(id);
  const bool admitted = found != sessions_.end() && found->second.admitted;
  return admitted ? kMaxFrameBytes : kMaxHelloBytes;
}

bool StoreServer::handle(int id, std::span<const std::byte> frame, Deadline now) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return false;
  Session& session = found->second;
  if (session.admitted) return handle_request(id, session, frame, now);
  return session.expected_proof.empty() ? handle_hello(id, session, frame)
                                        : handle_proof(id, session, frame);
}

bool StoreServer::handle_hello(int id, Session& session, std::span<const std::byte> frame) {
  auto hello = decode_store_hello(frame);
  if (!hello) {
    constexpr std::string_view kAnyFormat = "hvd store ";
    const auto field = read_field(frame);
    const std::string format = field ? text_of(*field) : "";
    if (!format.starts_with(kAnyFormat) || format == kFormat) return false;
    send_(id, reply_frame("version", 0, bytes_of(std::string(kFormat))), true);
    erase(id);
    return true;
  }
  const std::string nonce = random_id();
  session.hello = std::move(*hello);
  session.expected_proof = client_proof(options_.token, session.hello, nonce);
  const Bytes challenge =
      join_fields({options_.job, nonce, server_proof(options_.token, session.hello, nonce)});
  send_(id, reply_frame("challenge", 0, challenge), false);
  return true;
}

bool StoreServer::handle_proof(int id, Session& session, std::span<const std::byte> frame) {
  const auto fields = split_fields(frame, 2);
  const StoreHello& hello = session.hello;
  if (!fields || (fields->front() != "proof" && fields->front() != "distrust")) return false;
  const bool same_job = hello.job == options_.job;
  if (fields->front() == "distrust" || !same_job ||
      !same_secret((*fields)[1], session.expected_proof)) {
    if (foreign_.size() < kMaxForeign || foreign_.contains(hello.rank)) {
      foreign_[hello.rank] =
          text("a process (", printable(hello.process), ") that joined as rank ", hello.rank,
               " was refused: it has ",
               same_job ? "another token (HVD_JOB_TOKEN)" : "another job name (HVD_JOB_NAME)");
    }
    return false;
  }
  if (const auto objection = options_.admit ? options_.admit(id, hello) : std::nullopt) {
    refuse(id, *objection);
    return true;
  }
  const auto first = session_of_.find(hello.rank);
  if (options_.one_session_per_rank && first != session_of_.end()) {
    refuse(id,
           Refusal::usage(text("hvd::init: rank ", hello.rank, " (", hello.process,
                               ") has joined at ", options_.name, " twice, first from ",
                               sessions_.at(first->second).hello.process, options_.twice_advice)));
    return true;
  }
  session.admitted = true;
  session_of_[hello.rank] = id;
  unadmitted_.erase(id);
  set_timer(id, session, std::nullopt);
  send_(id, reply_frame("admitted"), false);
  return true;
}

bool StoreServer::handle_request(int id, Session& session, std::span<const std::byte> frame,
                                 Deadline now) {
  auto fields = split_fields(frame, kRequestFields);
  const auto left = fields ? parse_number<std::int64_t>(fields->back()) : std::nullopt;
  if (!left || !session.awaited.empty()) return false;
  const StoreRequest request{
      .verb = std::move((*fields)[0]),
      .key = std::move((*fields)[1]),
      .value = std::move((*fields)[2]),
      .once = std::move((*fields)[3]),
      .also = std::move((*fields)[4]),
      .left = std::chrono::milliseconds(std::clamp<std::int64_t>(*left, 0, kMaxMilliseconds))};
  const auto is_too_long = [](const std::string& key) { return key.size() > kMaxKeyBytes; };
  if (is_too_long(request.key) || is_too_long(request.once) || is_too_long(request.also))
    return false;
  const auto reply = [&](const Frame& sent) {
    send_(id, sent, false);
    return true;
  };
  static const Frame done = reply_frame("done");
  if (request.verb == "wait") return wait(id, session, request, now);
  if (request.verb == "add") return add(id, request.key, request.value);
  if (request.verb == "set") {
    store(request.key, bytes_of(request.value));
    return reply(done);
  }
  if (request.verb == "create") {
    if (values_.contains(request.key)) return reply(reply_frame("exists"));
    store(request.key, bytes_of(request.value));
    return reply(done);
  }
  if (request.verb == "get") {
    const auto found = values_.find(request.key);
    return reply(found == values_.end() ? reply_frame("absent") : frame_of(found->second, 0));
  }
  if (request.verb == "will") {
    const auto value = bytes_of(request.value);
    session.will = Will{request.key, {value.begin(), value.end()}, request.once, request.also};
    return reply(done);
  }
  if (request.verb == "remove_all_if") {
    const auto found = values_.find(request.key);
    if (found != values_.end() && text_of(found->second.get()) == request.value) remove_all();
    return reply(done);
  }
  if (request.verb != "close") return false;
  send_(id, done, true);
  erase(id);
  return true;
}

/// Removes all values, and ends the waits of their readers.
void StoreServer::remove_all() {
  static const Frame absent = reply_frame("absent");
  values_.clear();
  dormant_.clear();
  for (auto& [id, session] : sessions_)
    if (!session.awaited.empty()) end_wait(id, session, absent);
}

bool StoreServer::add(int id, const std::string& key, const std::string& amount) {
  const auto more = parse_number<std::int64_t>(amount);
  const auto found = values_.find(key);
  const auto before = found == values_.end()
                          ? std::optional<std::int64_t>(0)
                          : parse_number<std::int64_t>(text_of(found->second.get()));
  std::int64_t sum = 0;
  if (!more || !before || __builtin_add_overflow(*before, *more, &sum)) {
    send_(id, reply_frame("malformed"), false);
    return true;
  }
  store(key, bytes_of(text(sum)));
  send_(id, reply_frame("done", sum), false);
  return true;
}

bool StoreServer::wait(int id, Session& session, const StoreRequest& request, Deadline now) {
  const auto count = parse_number<std::size_t>(request.key);
  auto keys = count && *count > 0 && *count <= kMaxKeys
                  ? split_fields(bytes_of(request.value), *count)
                  : std::nullopt;
  if (!keys) return false;
  for (std::size_t index = 0; index < keys->size(); ++index) {
    const auto found = values_.find((*keys)[index]);
    if (found == values_.end()) continue;
    send_(id, frame_of(found->second, index), false);
    return true;
  }
  if (const auto& refusal = session.failed ? session.failed : failed_) {
    send_(id, reply_frame("refused", 0, encode(*refusal)), false);
    return true;
  }
  for (const std::string& key : *keys) waiting_[key].insert(id);
  session.awaited = std::move(*keys);
  set_timer(id, session, now + request.left);
  return true;
}

/// Sets a value, and ends the waits for it.
void StoreServer::store(const std::string& key, std::span<const std::byte> value) {
  Value& stored = values_[key];
  stored = {.frame = reply_frame("value", 0, value), .index = 0, .bytes = value.size()};
  if (const auto found = waiting_.find(key); found != waiting_.end()) {
    for (const int id : std::set<int>(found->second)) {
      Session& session = sessions_.at(id);
      const auto at = std::find(session.awaited.begin(), session.awaited.end(), key);
      end_wait(id, session,
               frame_of(stored, static_cast<std::size_t>(at - session.awaited.begin())));
    }
  }
  if (const auto will = dormant_.extract(key)) publish(will.mapped());
}

/// Publishes the will of a session that is lost, now or once its key has a value.
void StoreServer::publish(const Will& will) {
  if (!will.once.empty() && !values_.contains(will.once)) {
    dormant_[will.once] = will;
    return;
  }
  if (!values_.contains(will.key)) store(will.key, will.value);
  if (!will.also.empty()) store(will.also, {});
}

/// The reply with the value to a wait in which the key has this index.
const StoreServer::Frame& StoreServer::frame_of(Value& value, std::size_t index) {
  if (value.index != index) {
    value.frame = reply_frame("value", static_cast<std::int64_t>(index), value.get());
    value.index = index;
  }
  return value.frame;
}

void StoreServer::end_wait(int id, Session& session, const Frame& reply) {
  for (const std::string& key : std::exchange(session.awaited, {})) {
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) continue;
    found->second.erase(id);
    if (found->second.empty()) waiting_.erase(found);
  }
  set_timer(id, session, std::nullopt);
  if (reply) send_(id, reply, false);
}

void StoreServer::fail(const Refusal& refusal) {
  if (failed_) return;
  failed_ = refusal;
  fail_sessions(refusal);
}

void StoreServer::fail_sessions(const Refusal& refusal) {
  const Frame reply = reply_frame("refused", 0, encode(refusal));
  for (auto& [id, session] : sessions_) {
    if (!session.admitted || session.failed) continue;
    session.failed = refusal;
    if (!session.awaited.empty()) end_wait(id, session, reply);
  }
}

void StoreServer::drop(int id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const auto will = std::move(found->second.will);
  erase(id);
  if (will) publish(*will);
}

bool StoreServer::end_oldest_unadmitted() {
  if (unadmitted_.empty()) return false;
  end(*unadmitted_.begin());
  return true;
}

std::string StoreServer::remarks(std::span<const int> ranks) const {
  constexpr int kMaxShown = 3;
  std::string listed;
  int count = 0;
  for (const int rank : ranks) {
    const auto found = foreign_.find(rank);
    if (found != foreign_.end() && count++ < kMaxShown) listed += "; " + found->second;
  }
  return listed;
}

std::optional<Deadline> StoreServer::next_deadline() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.begin()->first;
}

void StoreServer::on_time(Deadline now) {
  static const Frame absent = reply_frame("absent");
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const int id = timers_.begin()->second;
    Session& session = sessions_.at(id);
    session.admitted ? end_wait(id, session, absent) : end(id);
  }
}

void StoreServer::set_timer(int id, Session& session, std::optional<Deadline> until) {
  if (session.until) timers_.erase({*session.until, id});
  session.until = until;
  if (until) timers_.insert({*until, id});
}

void StoreServer::refuse(int id, const Refusal& refusal) {
  send_(id, reply_frame("refused", 0, encode(refusal)), true);
  erase(id);
}

void StoreServer::end(int id) {
  send_(id, nullptr, true);
  erase(id);
}

void StoreServer::erase(int id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  end_wait(id, session, nullptr);
  const auto of_rank = session_of_.find(session.hello.rank);
  if (of_rank != session_of_.end() && of_rank->second == id) session_of_.erase(of_rank);
  unadmitted_.erase(id);
  sessions_.erase(found);
}

}  // namespace hvd::rendezvous
