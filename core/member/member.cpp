#include "member/member.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"

namespace hvd::member {

void Member::join() {
  HVD_EXPECT(phase_ == Phase::kOutside, "a worker joins once");
  phase_ = Phase::kCandidate;
  send(Join{program_});
}

void Member::receive(const ToWorker& message) {
  if (phase_ == Phase::kOver) return;
  std::visit([this](const auto& received) { handle(received); }, message);
}

void Member::disconnected() {
  if (phase_ == Phase::kOver) return;
  phase_ = Phase::kOver;
  actions_.emplace_back(Exit{"the connection to hvdrun has ended"});
}

void Member::handle(const Reset& reset) {
  if (reset.generation <= wanted_ || phase_ == Phase::kOutside) return;
  change_.reset();
  target_.reset();
  if (phase_ == Phase::kReady) return announce(reset.generation);
  wanted_ = reset.generation;
  phase_ = Phase::kLeaving;
  actions_.emplace_back(Leave{reset.cause});
}

void Member::left(StateSummary state, bool can_load, std::string address, bool divided) {
  HVD_EXPECT(phase_ == Phase::kLeaving, "the coordinator has requested it");
  ready_ = {
      .state = state, .can_load = can_load, .divided = divided, .address = std::move(address)};
  announce(wanted_);
}

void Member::announce(Generation generation) {
  wanted_ = generation;
  ready_.generation = generation;
  phase_ = Phase::kReady;
  send(ready_);
}

void Member::handle(const Assign& assign) {
  if (phase_ != Phase::kReady || assign.generation != wanted_) return;
  const auto seat = std::find_if(assign.seats.begin(), assign.seats.end(),
                                 [this](const Seat& s) { return s.worker == own_; });
  if (seat == assign.seats.end()) return;
  const auto rank = static_cast<std::uint32_t>(seat - assign.seats.begin());
  phase_ = Phase::kForming;
  generation_ = assign.generation;
  seats_ = assign.seats;
  change_.reset();
  target_.reset();
  actions_.emplace_back(Form{assign, rank, seat->receives});
}

void Member::synced(Generation generation, StateSummary state) {
  if (phase_ != Phase::kForming || generation != generation_) return;
  begun_ = state.commit;
  phase_ = Phase::kSynced;
  send(Synced{generation, state});
}

void Member::handle(const Go& go) {
  if (phase_ != Phase::kSynced || go.generation != generation_) return;
  phase_ = Phase::kRunning;
  actions_.emplace_back(Run{generation_});
}

void Member::failed(std::optional<WorkerId> accused, std::string cause) {
  if (phase_ != Phase::kForming && phase_ != Phase::kSynced && phase_ != Phase::kRunning &&
      phase_ != Phase::kAtEnd)
    return;
  phase_ = Phase::kFailed;
  send(Failed{generation_, accused, std::move(cause)});
}

void Member::report_exception(Commit commit, std::string cause) {
  if (generation_ > 0 && phase_ != Phase::kOver)
    send(ProgramFailed{generation_, commit, std::move(cause)});
}

void Member::at_end() {
  HVD_EXPECT(phase_ == Phase::kRunning || phase_ == Phase::kLeaving || phase_ == Phase::kFailed,
             "the program's function was entered");
  if (phase_ != Phase::kRunning) return;
  phase_ = Phase::kAtEnd;
  send(AtEnd{generation_});
}

void Member::handle(const Prepare& prepare) {
  const bool runs = phase_ == Phase::kRunning || phase_ == Phase::kAtEnd;
  if (!runs || prepare.generation != generation_) return;
  change_ = prepare.change;
  answered_ = begun_;
  send(Begun{prepare.change, begun_});
}

void Member::handle(const Target& target) {
  if (change_ != target.change) return;
  target_ = target;
  actions_.emplace_back(Wake{});
}

Member::Verdict Member::begin_commit() {
  HVD_EXPECT(phase_ == Phase::kRunning || phase_ == Phase::kLeaving || phase_ == Phase::kFailed,
             "the program's function was entered");
  ++begun_;
  return may_commit();
}

Member::Verdict Member::may_commit() {
  HVD_EXPECT(!target_ || begun_ <= target_->commit, "no program has passed the commit of a change");
  if (phase_ != Phase::kRunning) return Verdict::kStop;
  if (!target_) return change_ && begun_ > answered_ ? Verdict::kWait : Verdict::kGoOn;
  if (begun_ < target_->commit) return Verdict::kGoOn;
  wanted_ = target_->next;
  phase_ = Phase::kLeaving;
  return Verdict::kStop;
}

std::vector<int> Member::leaving() const {
  std::vector<int> ranks;
  if (!target_ || begun_ != target_->commit) return ranks;
  const std::vector<WorkerId>& workers = target_->leaving;
  for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
    if (std::find(workers.begin(), workers.end(), seats_[rank].worker) != workers.end())
      ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void Member::handle(const End&) {
  phase_ = Phase::kOver;
  actions_.emplace_back(Finish{});
}

void Member::handle(const Ping&) { send(Pong{}); }

void Member::handle(const Refused& refused) {
  phase_ = Phase::kOver;
  actions_.emplace_back(Exit{refused.reason});
}

std::vector<MemberAction> Member::take_actions() { return std::exchange(actions_, {}); }

}  // namespace hvd::member
