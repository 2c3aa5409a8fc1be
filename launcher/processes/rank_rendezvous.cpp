#include "processes/rank_rendezvous.h"

#include <cstring>
#include <span>
#include <string_view>

#include "base/text.h"
#include "system/event_loop.h"

namespace hvd::launcher {
namespace {

using rendezvous::Refusal;
using rendezvous::StoreHello;
using rendezvous::StoreServer;

/// If a rank reports the loss of another rank and ends, the report of its end to the other ranks is
/// delayed by this time, because the end of the lost rank may become known in the meantime.
constexpr auto kTimeForTheCause = std::chrono::seconds(1);

}  // namespace

RankRendezvous::RankRendezvous(int size, std::string job, std::string token, Send send)
    : size_(size),
      send_(std::move(send)),
      requested_join_(static_cast<std::size_t>(size)),
      left_(static_cast<std::size_t>(size)),
      server_({.name = "hvdrun://",
               .job = std::move(job),
               .token = std::move(token),
               .twice_advice = ", which has not called hvd::shutdown() since; one process of each "
                               "rank calls hvd::init()",
               .admit = [this](int id, const StoreHello& hello) { return objection(id, hello); },
               .max_unadmitted = static_cast<std::size_t>(size) + 1024},
              [this](int id, const Bytes& frame, bool last) { this->send(id, frame, last); }) {}

void RankRendezvous::receive(int rank, const RendezvousBytes& received, Deadline now) {
  const Key key{rank, received.session};
  const auto [found, is_new] = sessions_.try_emplace(key);
  Session& session = found->second;
  if (is_new) {
    session.id = next_id_++;
    keys_[session.id] = key;
    server_.open(session.id, now);
  }
  if (!session.ended) {
    session.incoming += received.bytes;
    if (!process_frames(session, now)) {
      server_.drop(session.id);
      send(session.id, nullptr, true);
    }
  }
  if (!received.last) return;
  server_.drop(session.id);
  keys_.erase(session.id);
  sessions_.erase(key);
}

/// Returns false if the bytes are not frames of hvd.
bool RankRendezvous::process_frames(Session& session, Deadline now) {
  const std::string incoming = std::exchange(session.incoming, {});
  std::string_view rest = incoming;
  std::uint32_t size = 0;
  while (!session.ended && rest.size() >= sizeof size) {
    std::memcpy(&size, rest.data(), sizeof size);
    if (size > server_.frame_limit(session.id)) return false;
    if (rest.size() < sizeof size + size) break;
    if (!server_.handle(session.id, std::as_bytes(std::span(rest.substr(sizeof size, size))), now))
      return false;
    rest.remove_prefix(sizeof size + size);
  }
  if (!session.ended) session.incoming = rest;
  return true;
}

/// The reason why hvdrun refuses a process that has the job's token.
std::optional<Refusal> RankRendezvous::objection(int id, const StoreHello& hello) {
  const int rank = keys_.at(id).first;
  requested_join_[static_cast<std::size_t>(rank)] = true;
  if (hello.rank == rank && hello.size == size_) {
    return contradiction_unsent_.erase(rank) > 0 ? contradiction_ : std::nullopt;
  }
  contradiction_ = Refusal::usage(
      text("hvd::init: hvdrun has started rank ", rank, " of ", size_,
           ", which has joined as rank ", hello.rank, " of ", hello.size, " (", hello.process,
           "); leave Options::rank, Options::world_size, HVD_RANK and HVD_SIZE to hvdrun"));
  for (int other = 0; other < size_; ++other)
    if (other != rank && !server_.has_session(other)) contradiction_unsent_.insert(other);
  server_.fail_sessions(*contradiction_);
  return contradiction_;
}

void RankRendezvous::send(int id, const Bytes& frame, bool last) {
  static const Bytes nothing = std::make_shared<const rendezvous::Bytes>();
  const auto found = keys_.find(id);
  if (found == keys_.end()) return;
  const Key key = found->second;
  send_(key.first, key.second, frame ? frame : nothing, last);
  if (!last) return;
  // The server forgets an admitted session only after this call.
  const auto at = static_cast<std::size_t>(key.first);
  left_[at] = left_[at] || server_.has_session(key.first);
  Session& session = sessions_.at(key);
  session.ended = true;
  session.incoming = {};
  keys_.erase(found);
}

void RankRendezvous::rank_ended(int rank, const std::string& how, bool after_loss, Deadline now) {
  const auto first = sessions_.lower_bound({rank, 0});
  const auto last = sessions_.lower_bound({rank + 1, 0});
  std::vector<int> ids;
  bool in_session = false;
  for (auto session = first; session != last; ++session) {
    ids.push_back(session->second.id);
    in_session = in_session || !session->second.ended;
  }
  sessions_.erase(first, last);
  for (const int id : ids) {
    keys_.erase(id);
    server_.drop(id);
  }
  const Refusal refusal = Refusal::lost(rank, text("hvd::init: rank ", rank, " has ended (", how,
                                                   ") and will not join at hvdrun://"));
  const bool left = left_[static_cast<std::size_t>(rank)] && !in_session;
  if (!after_loss && !left) {
    report_suspicion_at_.reset();
    failed_ = true;
    server_.fail(refusal);
  } else if (!failed_ && !report_suspicion_at_) {
    suspected_cause_ = refusal;
    report_suspicion_at_ = now + kTimeForTheCause;
  }
}

std::optional<Deadline> RankRendezvous::next_deadline() const {
  std::optional<Deadline> next = report_suspicion_at_;
  keep_earlier(next, server_.next_deadline());
  return next;
}

void RankRendezvous::on_time(Deadline now) {
  if (report_suspicion_at_ && now >= *report_suspicion_at_) {
    report_suspicion_at_.reset();
    failed_ = true;
    server_.fail(*suspected_cause_);
  }
  server_.on_time(now);
}

}  // namespace hvd::launcher
