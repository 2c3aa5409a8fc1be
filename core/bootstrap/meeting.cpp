#include "bootstrap/meeting.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace hvd::rendezvous {
namespace {

constexpr std::size_t kRequestFields = 4;
constexpr std::size_t kAnswerFields = 2;
/// More than any job waits; less than a clock would mind.
constexpr std::int64_t kMostMilliseconds = std::int64_t{1} << 40;

std::optional<std::chrono::milliseconds> milliseconds_in(const std::string& text) {
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return std::chrono::milliseconds(std::clamp<std::int64_t>(count, 0, kMostMilliseconds));
}

Refusal usage(std::string text) {
  return {.usage = true, .rank = -1, .text = "hvd::init: " + std::move(text)};
}

}  // namespace

Bytes encode(const Request& request) {
  return join_fields(
      {request.verb, request.key, request.value, std::to_string(request.left.count())});
}

std::optional<Request> decode_request(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, kRequestFields);
  const auto left = fields ? milliseconds_in(fields->back()) : std::nullopt;
  if (!left) return std::nullopt;
  return Request{.verb = std::move((*fields)[0]),
                 .key = std::move((*fields)[1]),
                 .value = std::move((*fields)[2]),
                 .left = *left};
}

std::optional<Answer> decode_answer(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, kAnswerFields);
  if (!fields) return std::nullopt;
  return Answer{.verdict = std::move((*fields)[0]), .value = std::move((*fields)[1])};
}

std::shared_ptr<const Bytes> frame_of(const std::string& verdict,
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

Meeting::Meeting(Rules rules, Send send) : rules_(std::move(rules)), send_(std::move(send)) {}

bool Meeting::handle(int session, std::span<const std::byte> bytes, Deadline now) {
  const auto request = decode_request(bytes);
  if (!request) return false;
  const Deadline until = now + request->left;
  const auto known = visitors_.find(session);
  if (request->verb == "come") {
    if (known != visitors_.end()) return false;
    come(session, *request, now);
    return true;
  }
  if (known == visitors_.end() || !begun_ || !known->second.awaited.empty()) return false;
  if (request->verb == "put") {
    put(session, request->key, request->value);
  } else if (request->verb == "wait") {
    wait(session, request->key, until);
  } else if (request->verb == "exchange") {
    exchange(session, *request, until);
  } else if (request->verb == "leave") {
    leave(session);
  } else if (request->verb == "fail") {
    fail(request->value);
    answer(session, "done");
  } else if (request->verb == "get") {
    const auto found = values_.find(request->key);
    found == values_.end() ? answer(session, "nothing") : answer(session, "value", found->second);
  } else {
    return false;
  }
  return true;
}

void Meeting::come(int session, const Request& request, Deadline now) {
  const auto arrival = decode_arrival(bytes_of(request.value));
  if (refused_) {
    if (arrival) told_.insert(arrival->introduction.rank);
    return refuse(session, *refused_);
  }
  if (!arrival) {
    return refuse(session,
                  usage("a rank has come to " + rules_.place +
                        " with another version of hvd; start the same program everywhere"));
  }
  const Introduction& other = arrival->introduction;
  if (!rules_.reference) rules_.reference = other;
  const Introduction& own = *rules_.reference;
  if (const auto objection = object_to(*arrival, own, rules_.place)) {
    refuse(session, *objection);
    if (!is_of_job(other, own)) return strangers_.note(*arrival, own);
    told_.insert(other.rank);
    return refuse_all(*objection);
  }
  if (const auto first = session_of_.find(other.rank); first != session_of_.end()) {
    return refuse(session,
                  usage("rank " + std::to_string(other.rank) + " has come to " + rules_.place +
                        " twice, first from " + *who(first->second) + "; start each rank once"));
  }
  if (begun_) {
    return refuse(session,
                  usage("rank " + std::to_string(other.rank) + " has come to " + rules_.place +
                        " again when the job had begun; start all ranks "
                        "anew"));
  }
  visitors_[session] = {.arrival = *arrival};
  session_of_[other.rank] = session;
  const Deadline give_up = time_to_refuse(now + request.left, now);
  if (!give_up_ || give_up < *give_up_) {
    give_up_ = give_up;
    limit_ = request.left;
  }
  if (static_cast<int>(session_of_.size()) < rules_.size) return;  // all are answered at once
  begun_ = true;
  if (rules_.size == 1) values_[kAllLeft] = "";
  const auto welcome = frame_of("welcome", {});
  for (const auto& [rank, each] : session_of_) send_(each, welcome, false);
}

std::vector<int> Meeting::release(const std::string& awaited, bool exchanges) {
  std::vector<int> sessions;
  for (auto& [session, visitor] : visitors_) {
    if (visitor.awaited != awaited || visitor.exchanges != exchanges) continue;
    visitor.awaited.clear();
    sessions.push_back(session);
  }
  return sessions;
}

void Meeting::put(int session, const std::string& key, const std::string& value) {
  if (!values_.emplace(key, value).second) return answer(session, "exists");
  answer(session, "done");
  const auto frame = frame_of("value", bytes_of(value));
  for (const int waiting : release(key, false)) send_(waiting, frame, false);
}

void Meeting::wait(int session, const std::string& key, Deadline until) {
  const auto found = values_.find(key);
  if (found != values_.end()) return answer(session, "value", found->second);
  if (failed_ && key != kAllLeft) return answer(session, "failed", *failed_);
  Visitor& visitor = visitors_.at(session);
  visitor.awaited = key;
  visitor.exchanges = false;
  visitor.until = until;
}

void Meeting::exchange(int session, const Request& request, Deadline until) {
  Visitor& visitor = visitors_.at(session);
  Exchange& parts = exchanges_[request.key];
  if (!parts.emplace(visitor.arrival.introduction.rank, request.value).second)
    return answer(session, "exists");
  if (failed_) return answer(session, "failed", *failed_);
  visitor.awaited = request.key;
  visitor.exchanges = true;
  visitor.until = until;
  if (static_cast<int>(parts.size()) == rules_.size) complete(request.key);
}

/// All parts have come: one frame for all.
void Meeting::complete(const std::string& what) {
  std::vector<std::string> parts;
  const auto all = exchanges_.extract(what);
  for (auto& [rank, part] : all.mapped()) parts.push_back(std::move(part));
  const auto frame = frame_of("all", join_fields(parts));
  for (const int session : release(what, true)) send_(session, frame, false);
}

/// The first that has not said its part.
std::string Meeting::absent_from(const std::string& what) const {
  const auto parts = exchanges_.find(what);
  int rank = 0;
  while (parts != exchanges_.end() && parts->second.contains(rank)) ++rank;
  return std::to_string(rank);
}

void Meeting::leave(int session) {
  Visitor& visitor = visitors_.at(session);
  const bool before = std::exchange(visitor.left, true);
  answer(session, "done");
  if (!before && visitor.arrival.introduction.rank != 0) count_as_left();
}

/// One of the others needs nothing more of rank 0.
void Meeting::count_as_left() {
  if (++left_ != rules_.size - 1) return;
  values_[kAllLeft] = "";
  for (const int waiting : release(kAllLeft, false)) answer(waiting, "value");
}

void Meeting::fail(const std::string& reason) {
  if (failed_) return;
  failed_ = reason;
  const auto frame = frame_of("failed", bytes_of(reason));
  for (auto& [session, visitor] : visitors_) {
    if (visitor.awaited.empty() || visitor.awaited == kAllLeft) continue;
    visitor.awaited.clear();
    send_(session, frame, false);
  }
}

void Meeting::drop(int session) {
  const auto found = visitors_.find(session);
  if (found == visitors_.end()) return;
  const Visitor visitor = std::move(found->second);
  const int rank = visitor.arrival.introduction.rank;
  visitors_.erase(found);
  session_of_.erase(rank);
  if (visitor.left) return;
  if (!begun_) {
    std::vector<int> others = absent();
    std::erase(others, rank);
    told_.insert(rank);
    return refuse_all(ended(visitor.arrival, rules_.place, others));
  }
  const std::string text = "hvd::init: rank " + std::to_string(rank) + " (" +
                           visitor.arrival.who() + ") has ended while the job began";
  fail(text_of(encode(Failure{.reason = text, .lost = rank})));
  if (rank != 0) count_as_left();
}

void Meeting::refuse_all(const Refusal& refusal) {
  if (refused_ || begun_) return;
  refused_ = refusal;
  visitors_.clear();
  for (const auto& [rank, session] : std::exchange(session_of_, {})) {
    told_.insert(rank);
    refuse(session, refusal);
  }
}

std::optional<Deadline> Meeting::next_deadline() const {
  std::optional<Deadline> next;
  if (gathering()) next = give_up_;
  for (const auto& [session, visitor] : visitors_) {
    if (!visitor.awaited.empty() && (!next || visitor.until < *next)) next = visitor.until;
  }
  return next;
}

void Meeting::on_time(Deadline now) {
  if (gathering() && give_up_ && now >= *give_up_) {
    const std::vector<int> ranks = absent();
    refuse_all(missing(ranks, rules_.place, limit_, rules_.advice, strangers_.text(ranks)));
  }
  for (auto& [session, visitor] : visitors_) {
    if (visitor.awaited.empty() || now < visitor.until) continue;
    const std::string awaited = std::exchange(visitor.awaited, {});
    visitor.exchanges ? answer(session, "absent", absent_from(awaited))
                      : answer(session, "nothing");
  }
}

std::vector<int> Meeting::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < rules_.size; ++rank)
    if (!session_of_.contains(rank)) ranks.push_back(rank);
  return ranks;
}

bool Meeting::over() const {
  return !gathering() && std::all_of(visitors_.begin(), visitors_.end(),
                                     [](const auto& item) { return item.second.left; });
}

std::optional<std::string> Meeting::who(int session) const {
  const auto found = visitors_.find(session);
  if (found == visitors_.end()) return std::nullopt;
  return found->second.arrival.who();
}

void Meeting::answer(int session, const std::string& verdict, const std::string& value) {
  send_(session, frame_of(verdict, bytes_of(value)), false);
}

void Meeting::refuse(int session, const Refusal& refusal) {
  send_(session, frame_of("refused", encode(refusal)), true);
}

}  // namespace hvd::rendezvous
