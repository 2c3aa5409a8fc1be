#include "processes/meetings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

namespace hvd::launcher {
namespace {

using rendezvous::JoinRequest;
using rendezvous::Refusal;
using rendezvous::RendezvousServer;

constexpr const char* kPlace = "hvdrun://";
constexpr const char* kAdvice =
    "see what it does before it calls hvd::init(), and whether all ranks run the same program";

/// If a rank reports the loss of another rank and ends, its end is held back this long, until the
/// end of the lost rank is known.
constexpr auto kTimeForTheFirst = std::chrono::seconds(1);

Refusal usage_error(std::string text) {
  return {.usage = true, .rank = -1, .text = "hvd::init: " + std::move(text)};
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

Meetings::Meetings(int size, std::string job, std::string token, Send send)
    : size_(size),
      job_(std::move(job)),
      token_(std::move(token)),
      send_(std::move(send)),
      ids_of_rank_(static_cast<std::size_t>(size)),
      has_come_(static_cast<std::size_t>(size)) {}

void Meetings::take(int rank, const MeetingBytes& said, Deadline now) {
  const auto [known, is_new] = id_of_.try_emplace({rank, said.session}, next_id_);
  const int id = known->second;
  if (is_new) {
    ++next_id_;
    sessions_[id] = {.rank = rank, .number = said.session};
    ids_of_rank_[static_cast<std::size_t>(rank)].insert(id);
  }
  sessions_.at(id).incoming += said.bytes;
  if (!cut_frames(id, now)) {
    drop(id, true);
  } else if (said.last) {
    drop(id, false);
  }
  tidy_up();
}

/// Returns false if the bytes are not requests of hvd.
bool Meetings::cut_frames(int id, Deadline now) {
  const std::string incoming = std::exchange(sessions_.at(id).incoming, {});
  std::string_view rest = incoming;
  std::uint32_t size = 0;
  while (rest.size() >= sizeof size) {
    std::memcpy(&size, rest.data(), sizeof size);
    const Session& session = sessions_.at(id);
    const bool admitted = session.meeting && session.meeting->process(id);
    if (size > (admitted ? rendezvous::kMostFrameBytes : rendezvous::kMostJoinBytes)) return false;
    if (rest.size() < sizeof size + size) break;
    if (!handle(id, rest.substr(sizeof size, size), now)) return false;
    rest.remove_prefix(sizeof size + size);
  }
  sessions_.at(id).incoming = rest;
  return true;
}

bool Meetings::handle(int id, std::string_view frame, Deadline now) {
  Session& session = sessions_.at(id);
  if (session.meeting) return session.meeting->handle(id, as_bytes(frame), now);
  const auto request = rendezvous::decode_server_request(as_bytes(frame));
  if (!request || request->verb != "join") return false;
  // The rendezvous itself replies to an invalid request.
  if (const auto arrival = rendezvous::decode_join_request(rendezvous::bytes_of(request->value))) {
    has_come_[static_cast<std::size_t>(session.rank)] = true;
    const auto refuse = [&](const Refusal& refusal) {
      send_(session.rank, session.number, rendezvous::reply_frame("refused", encode(refusal)),
            true);
      told_.push_back(id);
      return true;
    };
    if (const auto objection = find_objection(id, *arrival)) return refuse(*objection);
    if (untold_.erase(session.rank) > 0) return refuse(*contradiction_);
    if (const auto contradicts = contradiction(session.rank, *arrival)) {
      gathering()->refuse_all(*contradicts);
      return refuse(*contradicts);
    }
    if (ended_) return refuse(*ended_);
  }
  session.meeting = gathering();
  return session.meeting->handle(id, as_bytes(frame), now);
}

std::optional<Refusal> Meetings::find_objection(int id, const JoinRequest& arrival) const {
  const int rank = sessions_.at(id).rank;
  const std::string who = "rank " + std::to_string(rank) + " (" + arrival.process() + ")";
  if (arrival.info.job != job_ || arrival.info.token != token_) {
    return usage_error("a process (" + arrival.process() + ") has joined at " + kPlace +
                       " without the name and the token of hvdrun's job (HVD_JOB_NAME, "
                       "HVD_JOB_TOKEN): they are those of another job, or were removed from its "
                       "environment; start it as hvdrun does");
  }
  for (const int other : ids_of_rank_[static_cast<std::size_t>(rank)]) {
    const auto& meeting = sessions_.at(other).meeting;
    const auto first = meeting ? meeting->process(other) : std::nullopt;
    if (other == id || !first) continue;
    return usage_error(who + " has joined at " + kPlace + " twice, first from " + *first +
                       ", which has not called hvd::shutdown() since; one process of each rank "
                       "calls hvd::init()");
  }
  return std::nullopt;
}

std::optional<Refusal> Meetings::contradiction(int rank, const JoinRequest& arrival) const {
  const auto& own = arrival.info;
  if (own.rank == rank && own.size == size_) return std::nullopt;
  return usage_error(
      "hvdrun has started rank " + std::to_string(rank) + " of " + std::to_string(size_) +
      ", which says that it is rank " + std::to_string(own.rank) + " of " +
      std::to_string(own.size) + " (" + arrival.process() +
      "); leave Options::rank, Options::world_size, HVD_RANK and HVD_SIZE to hvdrun");
}

/// A rank has ended, so not all can join.
void Meetings::cannot_begin(const Refusal& refusal) {
  if (ended_) return;
  ended_ = refusal;
  name_it_at_.reset();
  if (gathering_) gathering_->refuse_all(refusal);
}

const Meetings::MeetingPtr& Meetings::gathering() {
  if (gathering_ && gathering_->joining()) return gathering_;
  gathering_ = std::make_shared<RendezvousServer>(
      RendezvousServer::Options{.place = kPlace, .size = size_, .advice = kAdvice},
      [this](int id, const Bytes& frame, bool last) {
        const auto found = sessions_.find(id);
        if (found == sessions_.end()) return;
        send_(found->second.rank, found->second.number, frame, last);
        if (last) told_.push_back(id);
      });
  meetings_.push_back(gathering_);
  return gathering_;
}

void Meetings::rank_ended(int rank, const std::string& how, bool of_another, Deadline now) {
  const auto ids = ids_of_rank_[static_cast<std::size_t>(rank)];
  for (const int id : ids) drop(id, false);
  const Refusal refusal = {.usage = false,
                           .rank = rank,
                           .text = "hvd::init: rank " + std::to_string(rank) + " has ended (" +
                                   how + ") and will not join at " + kPlace};
  if (!of_another) {
    cannot_begin(refusal);
  } else if (!ended_ && !name_it_at_) {
    ended_of_another_ = refusal;
    name_it_at_ = now + kTimeForTheFirst;
  }
  tidy_up();
}

std::optional<Deadline> Meetings::next_deadline() const {
  std::optional<Deadline> next = name_it_at_;
  for (const MeetingPtr& meeting : meetings_) {
    const auto due = meeting->next_deadline();
    if (due && (!next || *due < *next)) next = due;
  }
  return next;
}

void Meetings::on_time(Deadline now) {
  if (name_it_at_ && now >= *name_it_at_) cannot_begin(*ended_of_another_);
  for (const MeetingPtr& meeting : meetings_) {
    const auto due = meeting->next_deadline();
    if (due && now >= *due) meeting->on_time(now);
  }
  tidy_up();
}

/// Ends a session. `tell`: its process does not know that yet.
void Meetings::drop(int id, bool tell) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  if (tell) {
    static const auto nothing = rendezvous::reply_frame("nothing", {});
    send_(found->second.rank, found->second.number, nothing, true);
  }
  const MeetingPtr meeting = found->second.meeting;
  end(id);
  if (meeting) meeting->drop(id);
}

void Meetings::end(int id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  id_of_.erase({found->second.rank, found->second.number});
  ids_of_rank_[static_cast<std::size_t>(found->second.rank)].erase(id);
  sessions_.erase(found);
}

/// Remembers a contradiction for ranks that join later, so that they do not report the end of the
/// others as the cause.
void Meetings::remember_contradiction() {
  const auto& refusal = gathering_->refused();
  if (!refusal || !refusal->usage) return;
  contradiction_ = refusal;
  for (int rank = 0; rank < size_; ++rank) untold_.insert(rank);
  for (const int id : told_) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end()) untold_.erase(found->second.rank);
  }
}

void Meetings::tidy_up() {
  if (gathering_) remember_contradiction();
  for (const int id : std::exchange(told_, {})) end(id);
  std::erase_if(meetings_, [](const MeetingPtr& meeting) { return meeting->finished(); });
  if (gathering_ && !gathering_->joining()) gathering_.reset();
}

}  // namespace hvd::launcher
