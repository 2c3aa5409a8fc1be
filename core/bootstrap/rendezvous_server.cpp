#include "bootstrap/rendezvous_server.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace hvd::rendezvous {
namespace {

constexpr std::size_t kRequestFields = 4;
constexpr std::size_t kAnswerFields = 2;
/// Longer than any timeout, and short enough that adding it to the time does not overflow.
constexpr std::int64_t kMostMilliseconds = std::int64_t{1} << 40;

std::optional<std::chrono::milliseconds> milliseconds_in(const std::string& digits) {
  const auto count = parse_number<std::int64_t>(digits);
  if (!count) return std::nullopt;
  return std::chrono::milliseconds(std::clamp<std::int64_t>(*count, 0, kMostMilliseconds));
}

Refusal usage(const std::string& reason) {
  return {.usage = true, .rank = -1, .text = "hvd::init: " + reason};
}

}  // namespace

Bytes encode(const ServerRequest& request) {
  return join_fields({request.verb, request.key, request.value, text(request.left.count())});
}

std::optional<ServerRequest> decode_server_request(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, kRequestFields);
  const auto left = fields ? milliseconds_in(fields->back()) : std::nullopt;
  if (!left) return std::nullopt;
  return ServerRequest{.verb = std::move((*fields)[0]),
                       .key = std::move((*fields)[1]),
                       .value = std::move((*fields)[2]),
                       .left = *left};
}

std::optional<ServerReply> decode_reply(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, kAnswerFields);
  if (!fields) return std::nullopt;
  return ServerReply{.verdict = std::move((*fields)[0]), .value = std::move((*fields)[1])};
}

std::shared_ptr<const Bytes> reply_frame(const std::string& verdict,
                                         std::span<const std::byte> value) {
  const auto first = static_cast<std::uint32_t>(verdict.size());
  const auto second = static_cast<std::uint32_t>(value.size());
  const std::uint32_t all = 2 * sizeof first + first + second;
  auto frame = std::make_shared<Bytes>();
  frame->reserve(sizeof all + all);
  const auto append = [&frame](std::span<const std::byte> bytes) {
    frame->insert(frame->end(), bytes.begin(), bytes.end());
  };
  append(std::as_bytes(std::span(&all, 1)));
  append(std::as_bytes(std::span(&first, 1)));
  append(bytes_of(verdict));
  append(std::as_bytes(std::span(&second, 1)));
  append(value);
  return frame;
}

RendezvousServer::RendezvousServer(Options options, Send send)
    : options_(std::move(options)), send_(std::move(send)) {}

bool RendezvousServer::handle(int id, std::span<const std::byte> bytes, Deadline now) {
  const auto request = decode_server_request(bytes);
  if (!request) return false;
  const Deadline until = now + request->left;
  const auto known = sessions_.find(id);
  if (request->verb == "join") {
    if (known != sessions_.end()) return false;
    join(id, *request, now);
    return true;
  }
  if (known == sessions_.end() || !begun_ || !known->second.awaited.empty()) return false;
  if (request->verb == "put") {
    put(id, request->key, request->value);
  } else if (request->verb == "wait") {
    wait(id, request->key, until);
  } else if (request->verb == "exchange") {
    exchange(id, *request, until);
  } else if (request->verb == "leave") {
    leave(id);
  } else if (request->verb == "fail") {
    fail(request->value);
    reply(id, "done");
  } else if (request->verb == "get") {
    const auto found = values_.find(request->key);
    found == values_.end() ? reply(id, "nothing") : reply(id, "value", found->second);
  } else {
    return false;
  }
  return true;
}

void RendezvousServer::join(int id, const ServerRequest& request, Deadline now) {
  const auto joiner = decode_join_request(bytes_of(request.value));
  if (refused_) {
    if (joiner) informed_.insert(joiner->info.rank);
    return refuse(id, *refused_);
  }
  if (!joiner) {
    return refuse(id,
                  usage(text("a rank has joined at ", options_.place,
                             " with another version of hvd; start the same program everywhere")));
  }
  const RankInfo& other = joiner->info;
  if (!options_.reference) options_.reference = other;
  const RankInfo& own = *options_.reference;
  if (const auto objection = find_objection(*joiner, own, options_.place)) {
    refuse(id, *objection);
    if (!same_job(other, own)) return foreign_.add(*joiner, own);
    informed_.insert(other.rank);
    return refuse_all(*objection);
  }
  if (const auto first = session_of_.find(other.rank); first != session_of_.end()) {
    return refuse(
        id, usage(text("rank ", other.rank, " has joined at ", options_.place,
                       " twice, first from ", *process(first->second), "; start each rank once")));
  }
  if (begun_) {
    return refuse(id, usage(text("rank ", other.rank, " has joined at ", options_.place,
                                 " again after the job began; restart all ranks")));
  }
  sessions_[id] = {.request = *joiner};
  session_of_[other.rank] = id;
  const Deadline give_up = refusal_time(now + request.left, now);
  if (!give_up_ || give_up < *give_up_) {
    give_up_ = give_up;
    limit_ = request.left;
  }
  if (static_cast<int>(session_of_.size()) < options_.size) return;  // all are accepted together
  begun_ = true;
  if (options_.size == 1) values_[kAllLeft] = "";
  const auto accepted = reply_frame("accepted", {});
  for (const auto& [rank, each] : session_of_) send_(each, accepted, false);
}

std::vector<int> RendezvousServer::release(const std::string& awaited, bool exchanges) {
  std::vector<int> ids;
  for (auto& [id, session] : sessions_) {
    if (session.awaited != awaited || session.exchanges != exchanges) continue;
    session.awaited.clear();
    ids.push_back(id);
  }
  return ids;
}

void RendezvousServer::put(int id, const std::string& key, const std::string& value) {
  if (!values_.emplace(key, value).second) return reply(id, "exists");
  reply(id, "done");
  const auto frame = reply_frame("value", bytes_of(value));
  for (const int waiting : release(key, false)) send_(waiting, frame, false);
}

void RendezvousServer::wait(int id, const std::string& key, Deadline until) {
  const auto found = values_.find(key);
  if (found != values_.end()) return reply(id, "value", found->second);
  if (failed_ && key != kAllLeft) return reply(id, "failed", *failed_);
  Session& session = sessions_.at(id);
  session.awaited = key;
  session.exchanges = false;
  session.until = until;
}

void RendezvousServer::exchange(int id, const ServerRequest& request, Deadline until) {
  Session& session = sessions_.at(id);
  Exchange& parts = exchanges_[request.key];
  if (!parts.emplace(session.request.info.rank, request.value).second) return reply(id, "exists");
  if (failed_) return reply(id, "failed", *failed_);
  session.awaited = request.key;
  session.exchanges = true;
  session.until = until;
  if (static_cast<int>(parts.size()) == options_.size) complete(request.key);
}

/// Sends the parts of a complete exchange to all ranks, in one shared frame.
void RendezvousServer::complete(const std::string& what) {
  std::vector<std::string> parts;
  const auto all = exchanges_.extract(what);
  for (auto& [rank, part] : all.mapped()) parts.push_back(std::move(part));
  const auto frame = reply_frame("all", join_fields(parts));
  for (const int id : release(what, true)) send_(id, frame, false);
}

/// The first rank that has not contributed to an exchange.
std::string RendezvousServer::absent_from(const std::string& what) const {
  const auto parts = exchanges_.find(what);
  int rank = 0;
  while (parts != exchanges_.end() && parts->second.contains(rank)) ++rank;
  return text(rank);
}

void RendezvousServer::leave(int id) {
  Session& session = sessions_.at(id);
  const bool before = std::exchange(session.left, true);
  reply(id, "done");
  if (!before && session.request.info.rank != 0) count_as_left();
}

/// Counts a rank other than 0 that has left or ended.
void RendezvousServer::count_as_left() {
  if (++left_ != options_.size - 1) return;
  values_[kAllLeft] = "";
  for (const int waiting : release(kAllLeft, false)) reply(waiting, "value");
}

void RendezvousServer::fail(const std::string& reason) {
  if (failed_) return;
  failed_ = reason;
  const auto frame = reply_frame("failed", bytes_of(reason));
  for (auto& [id, session] : sessions_) {
    if (session.awaited.empty() || session.awaited == kAllLeft) continue;
    session.awaited.clear();
    send_(id, frame, false);
  }
}

void RendezvousServer::drop(int id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const Session session = std::move(found->second);
  const int rank = session.request.info.rank;
  sessions_.erase(found);
  session_of_.erase(rank);
  if (session.left) return;
  if (!begun_) {
    std::vector<int> others = absent();
    std::erase(others, rank);
    informed_.insert(rank);
    return refuse_all(ended(session.request, options_.place, others));
  }
  const std::string reason = text("hvd::init: rank ", rank, " (", session.request.process(),
                                  ") ended while the job began");
  fail(text_of(encode(Failure{.reason = reason, .lost = rank})));
  if (rank != 0) count_as_left();
}

void RendezvousServer::refuse_all(const Refusal& refusal) {
  if (refused_ || begun_) return;
  refused_ = refusal;
  sessions_.clear();
  for (const auto& [rank, id] : std::exchange(session_of_, {})) {
    informed_.insert(rank);
    refuse(id, refusal);
  }
}

std::optional<Deadline> RendezvousServer::next_deadline() const {
  std::optional<Deadline> next;
  if (joining()) next = give_up_;
  for (const auto& [id, session] : sessions_) {
    if (!session.awaited.empty() && (!next || session.until < *next)) next = session.until;
  }
  return next;
}

void RendezvousServer::on_time(Deadline now) {
  if (joining() && give_up_ && now >= *give_up_) {
    const std::vector<int> ranks = absent();
    refuse_all(missing(ranks, options_.place, limit_, options_.advice, foreign_.text(ranks)));
  }
  for (auto& [id, session] : sessions_) {
    if (session.awaited.empty() || now < session.until) continue;
    const std::string awaited = std::exchange(session.awaited, {});
    session.exchanges ? reply(id, "absent", absent_from(awaited)) : reply(id, "nothing");
  }
}

std::vector<int> RendezvousServer::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.size; ++rank)
    if (!session_of_.contains(rank)) ranks.push_back(rank);
  return ranks;
}

bool RendezvousServer::finished() const {
  return !joining() && std::all_of(sessions_.begin(), sessions_.end(),
                                   [](const auto& item) { return item.second.left; });
}

std::optional<std::string> RendezvousServer::process(int id) const {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return std::nullopt;
  return found->second.request.process();
}

void RendezvousServer::reply(int id, const std::string& verdict, const std::string& value) {
  send_(id, reply_frame(verdict, bytes_of(value)), false);
}

void RendezvousServer::refuse(int id, const Refusal& refusal) {
  send_(id, reply_frame("refused", encode(refusal)), true);
}

}  // namespace hvd::rendezvous
