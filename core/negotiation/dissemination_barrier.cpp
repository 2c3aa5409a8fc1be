#include "negotiation/dissemination_barrier.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::control {

DisseminationBarrier::DisseminationBarrier(std::vector<ArrivalFlags*> local, ArrivalFlags& remote,
                                           int host, int hosts)
    : local_(std::move(local)),
      remote_(remote),
      host_(host),
      hosts_(hosts),
      rounds_(static_cast<int>(std::bit_width(static_cast<unsigned>(hosts - 1)))) {}

// A rank whose flag is beyond this position was ready at this position.
DisseminationBarrier::Local DisseminationBarrier::local() const noexcept {
  bool all_here = true;
  for (const ArrivalFlags* const flags : local_) {
    const std::uint64_t flag = flags->arrived.load(std::memory_order_seq_cst);
    if (flag == position_ * 2 + 1) return Local::kLeaving;
    all_here = all_here && flag / 2 >= position_;
  }
  return all_here ? Local::kReady : Local::kAbsent;
}

void DisseminationBarrier::send_round(bool leaves, HostUpdates& to_send) {
  const auto next =
      static_cast<int>((static_cast<std::int64_t>(host_) + (std::int64_t{1} << sent_)) % hosts_);
  to_send.push_back(
      {next, {.position = position_, .round = static_cast<std::uint8_t>(sent_), .leaves = leaves}});
  ++sent_;
}

// Forwards a waiting rank's request to leave the replay to all other hosts, once per position. See
// ScheduleReplay::request_leave().
void DisseminationBarrier::forward_leave_request(HostUpdates& to_send) {
  const bool requested =
      leave_requested_ != position_ &&
      std::any_of(local_.begin(), local_.end(), [this](const ArrivalFlags* flags) {
        return flags->leave_requested.load(std::memory_order_acquire) == position_;
      });
  if (!requested) return;
  leave_requested_ = position_;
  for (int host = 0; host < hosts_; ++host) {
    if (host != host_) to_send.push_back({host, {.position = position_, .requests_leave = true}});
  }
}

bool DisseminationBarrier::advance(HostUpdates& to_send) {
  bool changed = false;
  for (;;) {
    forward_leave_request(to_send);
    Inbox& in = inbox(position_);
    const Local here = local();
    const bool leaves = in.leaves || here == Local::kLeaving;
    if (!leaves && here == Local::kAbsent) return changed;
    const auto received = [&](int round) { return (in.received >> round & 1) != 0; };
    while (sent_ < rounds_ && (leaves || sent_ == 0 || received(sent_ - 1)))
      send_round(leaves, to_send);
    if (!leaves && !(sent_ == rounds_ && received(rounds_ - 1))) return changed;
    remote_.arrived.store(position_ * 2 + (leaves ? 1 : 0), std::memory_order_seq_cst);
    changed = true;
    in = {};
    ++position_;
    sent_ = 0;
  }
}

bool DisseminationBarrier::accept(const wire::ReplayUpdate& update) {
  if (update.position < position_) return false;  // this host has left that position already
  if (update.position > position_ + 1 || (!update.requests_leave && update.round >= rounds_)) {
    throw Error(text("an update for position ", update.position, ", round ", update.round,
                     " of a replay, but this host is at position ", position_, " and there are ",
                     rounds_, " rounds"));
  }
  if (update.requests_leave) {
    // Updates of different hosts may overtake each other. A host that requests leaving at the next
    // position has passed this one, so no rank waits at this position any more.
    if (remote_.leave_requested.load(std::memory_order_relaxed) >= update.position) return false;
    remote_.leave_requested.store(update.position, std::memory_order_release);
    return true;
  }
  Inbox& in = inbox(update.position);
  in.received |= std::uint64_t{1} << update.round;
  in.leaves = in.leaves || update.leaves;
  return false;
}

}  // namespace hvd::control
