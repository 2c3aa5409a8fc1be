#include "negotiation/aggregator.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"
#include "hvd/error.h"
#include "negotiation/tensor_key.h"

namespace hvd::control {

// Note [What is held back]
// An operation runs when every member of its set has asked for it. So as long as a member below
// this rank has not asked, the coordinator could do nothing with what the others say, and it is
// held back until that member has asked too: then it goes on at once, as one entry whose ranks are
// the whole subtree. When everybody in the job has asked, nobody holds anything: a plan is never
// delayed.
//
// That is so only if every rank below does ask and asks the same way. Where that is in doubt, all
// that is held goes on at once and everything after it as it comes ("open"), until a plan has ended
// each operation that went on in parts:
//   - a rank joins (it will not ask, and the others do not wait for it) or has called shutdown();
//   - a name of the cache is asked for in full, so some ranks may hit and others ask;
//   - a report refers to the cache of before the epoch, or an epoch begins with something held;
//   - something was held for longest_hold: a stall, or a rank that is merely late. A child's report
//     that is overdue counts as held as long here.
// To hold a report back is to the rest of the job what a slow network is, so what is held can never
// make a wrong plan; this is only about not waiting in vain.

RankSet leaving_since(const wire::Report& merged, std::uint64_t replay_plan) {
  RankSet leaving = merged.leaving;
  for (const auto& applied : merged.applied) {
    if (applied.last_applied < replay_plan) leaving.remove(applied.ranks);
  }
  return leaving;
}

Aggregator::Aggregator(RankSet subtree, const Negotiator& state, Duration longest_hold)
    : members_(std::move(subtree), state.process_sets()),
      state_(state),
      longest_hold_(longest_hold),
      open_(state.cache()) {}

void Aggregator::accept(const wire::Report& merged, TimePoint now) {
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  const RankSet leaving = leaving_since(merged, replay_plan_);
  leaving_.add(leaving);
  ended_.add(intersection(merged.ended, leaving));
  if (merged.overdue) pass_on_overdue();
  if (merged.sections.empty()) acknowledged_ = true;
  for (const auto& section : merged.sections) {
    if (section.groups.empty() || section.as_of < replay_plan_) continue;
    HeldReports& held = held_as_of(section.as_of);
    for (const auto& group : section.groups) {
      for (const auto& hits : group.hits)
        add_hits(held, hits.slots, group.ranks, hits.report_number, now);
      for (const auto& hit : group.unnamed_hits)
        add_unnamed_hit(held, hit, group.ranks, section.as_of, now);
      for (const auto& asked : group.requests) add_request(held, asked, group.ranks, now);
    }
    if (held.empty()) held_.erase(std::min(section.as_of, epoch_));
  }
}

HeldReports& Aggregator::held_as_of(std::uint64_t as_of) {
  close_if_done();
  if (as_of < epoch_) open_.set_open();
  return held_[std::min(as_of, epoch_)];
}

void Aggregator::note_applied(RankSpan ranks, std::uint64_t last_applied) {
  for (auto& [sequence, known] : applied_) {
    if (sequence != last_applied) known.remove(ranks);
  }
  applied_[last_applied].add(ranks);
}

void Aggregator::add_hits(HeldReports& held, wire::SlotSet slots, RankSpan ranks,
                          std::uint64_t report_number, TimePoint now) {
  const auto add = [&](wire::SlotSet of_set, int process_set) {
    const bool complete =
        held.add_hits(std::move(of_set), ranks, report_number, process_set, now, members_);
    anything_complete_ = anything_complete_ || complete;
  };
  if (!state_.cache().slots_of_other_sets().empty()) {
    wire::SlotSet foreign = slots;
    foreign.intersect(state_.cache().slots_of_other_sets());
    slots.remove(foreign);
    foreign.for_each([&](std::uint32_t slot) {
      wire::SlotSet one;
      one.add(slot);
      add(std::move(one), state_.cache().at(slot).request.process_set);
    });
  }
  if (!slots.empty()) add(std::move(slots), 0);
}

void Aggregator::add_unnamed_hit(HeldReports& held, const wire::StampedUnnamedHit& hit,
                                 RankSpan ranks, std::uint64_t as_of, TimePoint now) {
  HeldReports::Variant variant{RankSet(ranks), hit.hit, {hit.stamp}};
  const wire::Response* const held_there = state_.cache().find(hit.hit.slot, as_of);
  if (held_there == nullptr) {  // the coordinator reports the error
    open_.set_open();
    return add_named(held, {}, 0, std::move(variant), now);
  }
  const wire::Request& alike = held_there->request;
  add_named(held,
            tensor_key(alike.process_set, wire::unnamed_name(alike.kind, hit.hit.ordinal)),
            alike.process_set, std::move(variant), now);
}

void Aggregator::add_request(HeldReports& held, wire::StampedRequest asked, RankSpan ranks,
                             TimePoint now) {
  const wire::Request& request = asked.request;
  if (request.kind == OpKind::kJoin) open_.note_joining(request.name);
  if (open_.joining() || (!request.unnamed && state_.cache().find(request))) open_.set_open();
  std::string key = tensor_key(request.process_set, request.name);
  const int process_set = request.process_set;
  add_named(held, std::move(key), process_set, {RankSet(ranks), std::nullopt, std::move(asked)},
            now);
}

void Aggregator::add_named(HeldReports& held, std::string key, int process_set,
                           HeldReports::Variant variant, TimePoint now) {
  const bool complete =
      held.add_named(std::move(key), process_set, std::move(variant), now, members_);
  anything_complete_ = anything_complete_ || complete;
}

std::optional<TimePoint> Aggregator::deadline() const {
  std::optional<TimePoint> oldest;
  for (const auto& [as_of, held] : held_) {
    if (const auto since = held.oldest()) oldest = std::min(oldest.value_or(*since), *since);
  }
  if (!oldest) return std::nullopt;
  return open() ? *oldest : *oldest + longest_hold_;
}

std::optional<wire::Report> Aggregator::take(TimePoint now) {
  if (!leaving_.empty()) open_.note_leaving();
  close_if_done();
  if (!open()) {
    if (const auto limit = deadline(); limit && *limit <= now) pass_on_overdue();
  }
  const bool anything = (open() ? !held_.empty() : anything_complete_) || acknowledged_ ||
                        overdue_ || !leaving_.empty();
  if (!anything) return std::nullopt;
  wire::Report report;
  report.overdue = std::exchange(overdue_, false);
  report.leaving = std::exchange(leaving_, {});
  report.ended = std::exchange(ended_, {});
  for (auto& [sequence, ranks] : std::exchange(applied_, {})) {
    if (!ranks.empty()) report.applied.push_back({sequence, std::move(ranks)});
  }
  for (auto held = held_.begin(); held != held_.end();) {
    wire::Report::Section section{held->first};
    move_out(held->second, section);
    if (!section.groups.empty()) report.sections.push_back(std::move(section));
    held = held->second.empty() ? held_.erase(held) : std::next(held);
  }
  acknowledged_ = anything_complete_ = false;
  return report;
}

void Aggregator::move_out(HeldReports& held, wire::Report::Section& section) {
  const bool of_epoch = section.as_of == epoch_;
  if (open()) {
    open_.remember(held.move_all(section, of_epoch ? &members_ : nullptr), section.as_of,
                   state_.last_applied());
  } else if (of_epoch) {
    held.move_complete(section, members_);
  }
}

void Aggregator::pass_on_overdue() noexcept {
  overdue_ = true;
  open_.set_open();
}

void Aggregator::close_if_done() noexcept {
  if (held_.empty() && !overdue_) open_.close_if_done();
}

void Aggregator::note_plan(const wire::Plan& plan) {
  HVD_EXPECT(state_.last_applied() == plan.sequence, "the negotiator has applied the plan");
  bool new_epoch = !plan.errors.empty() || !plan.replay.empty();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors)
      new_epoch = new_epoch || !std::holds_alternative<wire::SlotUse>(tensor);
  }
  open_.note_plan(plan);
  if (!plan.replay.empty()) forget_for_replay(plan.sequence);
  if (new_epoch) begin_epoch(plan.sequence);
}

// Whoever has asked for any of it asks again, after the replay or under it.
void Aggregator::forget_for_replay(std::uint64_t sequence) {
  replay_plan_ = sequence;
  held_.clear();
  leaving_ = {};
  ended_ = {};
  anything_complete_ = overdue_ = false;
  open_.reset();
}

void Aggregator::begin_epoch(std::uint64_t sequence) {
  if (!held_.empty()) open_.set_open();
  epoch_ = sequence;
  members_.forget_sets();
  open_.follow_displaced(sequence);
  open_.drop_removed(state_.process_sets());
}

}  // namespace hvd::control
