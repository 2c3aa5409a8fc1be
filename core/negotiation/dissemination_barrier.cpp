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

// A rank that is past the position has arrived there ready.
DisseminationBarrier::Local DisseminationBarrier::local() const noexcept {
  bool all_here = true;
  for (const ArrivalFlags* const flags : local_) {
    const std::uint64_t flag = flags->arrived.load(std::memory_order_seq_cst);
    if (flag == position_ * 2 + 1) return Local::kLeaving;
    all_here = all_here && flag / 2 >= position_;
  }
  return all_here ? Local::kReady : Local::kAbsent;
}

void DisseminationBarrier::send_round(bool leaves, std::vector<Send>& to_send) {
  const auto next =
      static_cast<int>((static_cast<std::int64_t>(host_) + (std::int64_t{1} << sent_)) % hosts_);
  to_send.push_back(
      {next, {.position = position_, .round = static_cast<std::uint8_t>(sent_), .leaves = leaves}});
  ++sent_;
}

// Forwards the wish of a rank of this host that waits in vain: see
// ScheduleReplay::ask_others_to_leave().
void DisseminationBarrier::forward_wish(std::vector<Send>& to_send) {
  const bool wishes = wished_ != position_ &&
                      std::any_of(local_.begin(), local_.end(), [this](const ArrivalFlags* flags) {
                        return flags->asked.load(std::memory_order_acquire) == position_;
                      });
  if (!wishes) return;
  wished_ = position_;
  for (int host = 0; host < hosts_; ++host) {
    if (host != host_) to_send.push_back({host, {.position = position_, .asks = true}});
  }
}

bool DisseminationBarrier::advance(std::vector<Send>& to_send) {
  bool changed = false;
  for (;;) {
    forward_wish(to_send);
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

bool DisseminationBarrier::accept(const wire::ReplayUpdate& news) {
  if (news.position < position_) return false;  // this host has left that position already
  if (news.position > position_ + 1 || (!news.asks && news.round >= rounds_)) {
    throw Error(text("news of position ", news.position, ", round ", news.round,
                     " of a replay, but this host is at position ", position_, " and there are ",
                     rounds_, " rounds"));
  }
  if (news.asks) {
    // Updates of different hosts overtake each other. A host that asks for the next position has
    // passed this one, so no rank waits here any more.
    if (remote_.asked.load(std::memory_order_relaxed) >= news.position) return false;
    remote_.asked.store(news.position, std::memory_order_release);
    return true;
  }
  Inbox& in = inbox(news.position);
  in.received |= std::uint64_t{1} << news.round;
  in.leaves = in.leaves || news.leaves;
  return false;
}

}  // namespace hvd::control
