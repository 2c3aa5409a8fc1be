#include "processes/rank_rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include "base/text.h"
#include "system/poller.h"

namespace hvd::launcher {
namespace {

using rendezvous::JoinRequest;
using rendezvous::Refusal;
using rendezvous::RendezvousServer;

constexpr const char* kPlace = "hvdrun://";
constexpr const char* kAdvice =
    "see what it does before it calls hvd::init(), and whether all ranks run the same program";

/// If a rank reports the loss of another rank and ends, the other ranks do not receive its end for
/// this long, because the end of the lost rank may become known in the meantime.
constexpr auto kTimeForTheCause = std::chrono::seconds(1);

template <class... Parts>
Refusal usage_error(const Parts&... parts) {
  return {.usage = true, .rank = -1, .text = text("hvd::init: ", parts...)};
}

std::span<const std::byte> as_bytes(std::string_view frame) {
  return std::as_bytes(std::span(frame.data(), frame.size()));
}

}  // namespace

RankRendezvous::RankRendezvous(int size, std::string job, std::string token, Send send)
    : size_(size),
      job_(std::move(job)),
      token_(std::move(token)),
      send_(std::move(send)),
      ids_of_rank_(static_cast<std::size_t>(size)),
      requested_join_(static_cast<std::size_t>(size)) {}

void RankRendezvous::receive(int rank, const RendezvousBytes& received, Deadline now) {
  const auto [known, is_new] = id_of_.try_emplace({rank, received.session}, next_id_);
  const int id = known->second;
  if (is_new) {
    ++next_id_;
    sessions_[id] = {.rank = rank, .number = received.session};
    ids_of_rank_[static_cast<std::size_t>(rank)].insert(id);
  }
  sessions_.at(id).incoming += received.bytes;
  if (!process_frames(id, now)) {
    drop(id, true);
  } else if (received.last) {
    drop(id, false);
  }
  tidy_up();
}

/// Returns false if the bytes are not requests of hvd.
bool RankRendezvous::process_frames(int id, Deadline now) {
  const std::string incoming = std::exchange(sessions_.at(id).incoming, {});
  std::string_view rest = incoming;
  std::uint32_t size = 0;
  while (rest.size() >= sizeof size) {
    std::memcpy(&size, rest.data(), sizeof size);
    const Session& session = sessions_.at(id);
    const bool admitted = session.server && session.server->process(id);
    if (size > (admitted ? rendezvous::kMostFrameBytes : rendezvous::kMostJoinBytes)) return false;
    if (rest.size() < sizeof size + size) break;
    if (!handle(id, rest.substr(sizeof size, size), now)) return false;
    rest.remove_prefix(sizeof size + size);
  }
  sessions_.at(id).incoming = rest;
  return true;
}

bool RankRendezvous::handle(int id, std::string_view frame, Deadline now) {
  Session& session = sessions_.at(id);
  if (session.server) return session.server->handle(id, as_bytes(frame), now);
  const auto request = rendezvous::decode_server_request(as_bytes(frame));
  if (!request || request->verb != "join") return false;
  // The server replies to an invalid request.
  if (const auto arrival = rendezvous::decode_join_request(rendezvous::bytes_of(request->value))) {
    requested_join_[static_cast<std::size_t>(session.rank)] = true;
    const auto refuse = [&](const Refusal& refusal) {
      send_(session.rank, session.number, rendezvous::reply_frame("refused", encode(refusal)),
            true);
      ended_sessions_.push_back(id);
      return true;
    };
    if (const auto objection = find_objection(id, *arrival)) return refuse(*objection);
    if (contradiction_unsent_.erase(session.rank) > 0) return refuse(*contradiction_);
    if (const auto contradicts = contradiction(session.rank, *arrival)) {
      joining_server()->refuse_all(*contradicts);
      return refuse(*contradicts);
    }
    if (ended_) return refuse(*ended_);
  }
  session.server = joining_server();
  return session.server->handle(id, as_bytes(frame), now);
}

std::optional<Refusal> RankRendezvous::find_objection(int id, const JoinRequest& arrival) const {
  const int rank = sessions_.at(id).rank;
  if (arrival.info.job != job_ || arrival.info.token != token_) {
    return usage_error("a process (", arrival.process(), ") has joined at ", kPlace,
                       " without the name and the token of hvdrun's job (HVD_JOB_NAME, "
                       "HVD_JOB_TOKEN): they are those of another job, or were removed from its "
                       "environment; start it as hvdrun does");
  }
  for (const int other : ids_of_rank_[static_cast<std::size_t>(rank)]) {
    const auto& server = sessions_.at(other).server;
    const auto first = server ? server->process(other) : std::nullopt;
    if (other == id || !first) continue;
    return usage_error("rank ", rank, " (", arrival.process(), ") has joined at ", kPlace,
                       " twice, first from ", *first,
                       ", which has not called hvd::shutdown() since; one process of each rank "
                       "calls hvd::init()");
  }
  return std::nullopt;
}

std::optional<Refusal> RankRendezvous::contradiction(int rank, const JoinRequest& arrival) const {
  const auto& own = arrival.info;
  if (own.rank == rank && own.size == size_) return std::nullopt;
  return usage_error(
      "hvdrun has started rank ", rank, " of ", size_, ", which has joined as rank ", own.rank,
      " of ", own.size, " (", arrival.process(),
      "); leave Options::rank, Options::world_size, HVD_RANK and HVD_SIZE to hvdrun");
}

/// Called when a rank has ended, after which a rendezvous can no longer be complete.
void RankRendezvous::refuse_from_now_on(const Refusal& refusal) {
  if (ended_) return;
  ended_ = refusal;
  blame_at_.reset();
  if (joining_) joining_->refuse_all(refusal);
}

const RankRendezvous::ServerPtr& RankRendezvous::joining_server() {
  if (joining_ && joining_->joining()) return joining_;
  joining_ = std::make_shared<RendezvousServer>(
      RendezvousServer::Options{.place = kPlace, .size = size_, .advice = kAdvice},
      [this](int id, const Bytes& frame, bool last) {
        const auto found = sessions_.find(id);
        if (found == sessions_.end()) return;
        send_(found->second.rank, found->second.number, frame, last);
        if (last) ended_sessions_.push_back(id);
      });
  servers_.push_back(joining_);
  return joining_;
}

void RankRendezvous::rank_ended(int rank, const std::string& how, bool after_loss, Deadline now) {
  const auto ids = ids_of_rank_[static_cast<std::size_t>(rank)];
  for (const int id : ids) drop(id, false);
  const Refusal refusal = {.usage = false,
                           .rank = rank,
                           .text = text("hvd::init: rank ", rank, " has ended (", how,
                                        ") and will not join at ", kPlace)};
  if (!after_loss) {
    refuse_from_now_on(refusal);
  } else if (!ended_ && !blame_at_) {
    ended_after_loss_ = refusal;
    blame_at_ = now + kTimeForTheCause;
  }
  tidy_up();
}

std::optional<Deadline> RankRendezvous::next_deadline() const {
  std::optional<Deadline> next = blame_at_;
  for (const ServerPtr& server : servers_) keep_earlier(next, server->next_deadline());
  return next;
}

void RankRendezvous::on_time(Deadline now) {
  if (blame_at_ && now >= *blame_at_) refuse_from_now_on(*ended_after_loss_);
  for (const ServerPtr& server : servers_) {
    const auto due = server->next_deadline();
    if (due && now >= *due) server->on_time(now);
  }
  tidy_up();
}

/// Ends a session. @param notify whether its process receives a last frame
void RankRendezvous::drop(int id, bool notify) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  if (notify) {
    static const auto nothing = rendezvous::reply_frame("nothing", {});
    send_(found->second.rank, found->second.number, nothing, true);
  }
  const ServerPtr server = found->second.server;
  forget(id);
  if (server) server->drop(id);
}

void RankRendezvous::forget(int id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  id_of_.erase({found->second.rank, found->second.number});
  ids_of_rank_[static_cast<std::size_t>(found->second.rank)].erase(id);
  sessions_.erase(found);
}

/// Remembers a contradiction for ranks that join later. Otherwise these would report the end of the
/// other ranks as the cause.
void RankRendezvous::remember_contradiction() {
  const auto& refusal = joining_->refused();
  if (!refusal || !refusal->usage) return;
  contradiction_ = refusal;
  for (int rank = 0; rank < size_; ++rank) contradiction_unsent_.insert(rank);
  for (const int id : ended_sessions_) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end()) contradiction_unsent_.erase(found->second.rank);
  }
}

void RankRendezvous::tidy_up() {
  if (joining_) remember_contradiction();
  for (const int id : std::exchange(ended_sessions_, {})) forget(id);
  std::erase_if(servers_, [](const ServerPtr& server) { return server->finished(); });
  if (joining_ && !joining_->joining()) joining_.reset();
}

}  // namespace hvd::launcher
