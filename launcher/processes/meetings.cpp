#include "processes/meetings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

namespace hvd::launcher {
namespace {

using rendezvous::Arrival;
using rendezvous::Meeting;
using rendezvous::Refusal;

constexpr const char* kPlace = "hvdrun://";
constexpr const char* kAdvice =
    "see what it does before it calls hvd::init(), and whether all ranks run the same program";

/// From the end of a rank that was told of another's to that one's.
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

/// False: what comes there is none of hvd's.
bool Meetings::cut_frames(int id, Deadline now) {
  const std::string incoming = std::exchange(sessions_.at(id).incoming, {});
  std::string_view rest = incoming;
  std::uint32_t size = 0;
  while (rest.size() >= sizeof size) {
    std::memcpy(&size, rest.data(), sizeof size);
    const Session& session = sessions_.at(id);
    const bool admitted = session.meeting && session.meeting->who(id);
    if (size > (admitted ? rendezvous::kMostFrameBytes : rendezvous::kMostArrivalBytes))
      return false;
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
  const auto request = rendezvous::decode_request(as_bytes(frame));
  if (!request || request->verb != "come") return false;
  // What it is not understood to say, the meeting answers.
  if (const auto arrival = rendezvous::decode_arrival(rendezvous::bytes_of(request->value))) {
    has_come_[static_cast<std::size_t>(session.rank)] = true;
    const auto refuse = [&](const Refusal& refusal) {
      send_(session.rank, session.number, rendezvous::frame_of("refused", encode(refusal)), true);
      told_.push_back(id);
      return true;
    };
    if (const auto objection = object_to(id, *arrival)) return refuse(*objection);
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

std::optional<Refusal> Meetings::object_to(int id, const Arrival& arrival) const {
  const int rank = sessions_.at(id).rank;
  const std::string who = "rank " + std::to_string(rank) + " (" + arrival.who() + ")";
  if (arrival.introduction.job != job_ || arrival.introduction.token != token_) {
    return usage_error("a process (" + arrival.who() + ") has come to " + kPlace +
                       " that has not the name and the token of hvdrun's job (HVD_JOB_NAME, "
                       "HVD_JOB_TOKEN): they are another job's, or were removed from its "
                       "environment; start it as hvdrun does");
  }
  for (const int other : ids_of_rank_[static_cast<std::size_t>(rank)]) {
    const auto& meeting = sessions_.at(other).meeting;
    const auto first = meeting ? meeting->who(other) : std::nullopt;
    if (other == id || !first) continue;
    return usage_error(who + " has come to " + kPlace + " twice, first from " + *first +
                       ", which has not called hvd::shutdown() since; one process of each rank "
                       "calls hvd::init()");
  }
  return std::nullopt;
}

std::optional<Refusal> Meetings::contradiction(int rank, const Arrival& arrival) const {
  const auto& own = arrival.introduction;
  if (own.rank == rank && own.size == size_) return std::nullopt;
  return usage_error(
      "hvdrun has started rank " + std::to_string(rank) + " of " + std::to_string(size_) +
      ", which says that it is rank " + std::to_string(own.rank) + " of " +
      std::to_string(own.size) + " (" + arrival.who() +
      "); leave Options::rank, Options::world_size, HVD_RANK and HVD_SIZE to hvdrun");
}

/// A rank has ended, so all cannot come.
void Meetings::cannot_begin(const Refusal& refusal) {
  if (ended_) return;
  ended_ = refusal;
  name_it_at_.reset();
  if (gathering_) gathering_->refuse_all(refusal);
}

const Meetings::MeetingPtr& Meetings::gathering() {
  if (gathering_ && gathering_->gathering()) return gathering_;
  gathering_ =
      std::make_shared<Meeting>(Meeting::Rules{.place = kPlace, .size = size_, .advice = kAdvice},
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
                                   how + ") and will not come to " + kPlace};
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

/// The session is over. `tell`: its process does not know.
void Meetings::drop(int id, bool tell) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  if (tell) {
    static const auto nothing = rendezvous::frame_of("nothing", {});
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

/// Ranks that come later are told too: what the others end of is not that they have ended.
void Meetings::note_contradiction() {
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
  if (gathering_) note_contradiction();
  for (const int id : std::exchange(told_, {})) end(id);
  std::erase_if(meetings_, [](const MeetingPtr& meeting) { return meeting->over(); });
  if (gathering_ && !gathering_->gathering()) gathering_.reset();
}

}  // namespace hvd::launcher
