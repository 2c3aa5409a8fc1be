#include <utility>

#include "control/aggregator.h"
#include "control/coordinator.h"
#include "hvd/error.h"

namespace hvd::control {

// Note [The whole world at once]
// In the steady state a merged report says that every rank has hit the same slots. With nothing
// else pending, what is planned then depends on nothing but the slots, the cache's contents and the
// fusion threshold. So the plan is kept, and such a report answered with it: the ready table never
// sees it. Anything else in between, or a reason to hold back, spreads the report into the table
// first, as if there were no shortcut.

void Coordinator::accept(const wire::MergedReport& merged, TimePoint now) {
  const RankRange world{0, static_cast<int>(reports_.size()) - 1};
  const auto check_ranks = [&](const RankSet& ranks) {
    if (!contains({&world, 1}, ranks)) {
      throw Error("a report came from rank " + std::to_string(ranks.highest()) +
                  ", which does not exist");
    }
  };
  spread_whole(now);
  learning_.reset();
  check_ranks(merged.leaving);
  for (const auto& applied : merged.applied) {
    check_ranks(applied.ranks);
    check_applied(applied.ranks, applied.last_applied);
  }
  if (!merged.sections.empty() || !merged.leaving.empty()) note_change(now);
  if (take_whole(merged)) return;
  for (const auto& section : merged.sections) {
    if (section.as_of > sequence_) {
      throw Error("a report refers to plan " + std::to_string(section.as_of) + "; the last is " +
                  std::to_string(sequence_));
    }
    for (const auto& group : section.groups) check_ranks(group.ranks);
    if (section.as_of < replay_plan_)
      continue;  // the ranks take it back when they come to the replay
    // What a rank asks for before it joins lies anywhere in the section.
    for (const bool joins : {false, true}) {
      for (const auto& group : section.groups)
        accept_group(group, {group.ranks, section.as_of, now}, joins);
    }
    note_activity(section, now);
  }
  // Last: what the sections say was said before.
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  if (table_.anyone_joined()) table_.refresh_join(now);
  shut_down_.add(leaving_since(merged, replay_plan_));
  ended_.add(merged.ended);
}

bool Coordinator::take_whole(const wire::MergedReport& merged) {
  if (merged.sections.size() != 1 || merged.sections[0].groups.size() != 1 ||
      merged.sections[0].as_of > sequence_ || merged.sections[0].as_of < replay_plan_) {
    return false;
  }
  const wire::MergedReport::Group& group = merged.sections[0].groups[0];
  const bool whole = group.hits.size() == 1 && group.unnamed_hits.empty() &&
                     group.requests.empty() && merged.leaving.empty() &&
                     group.ranks == RankSet(0, static_cast<int>(reports_.size()) - 1);
  const bool alone =
      table_.pending().empty() && failed_uses_.empty() && displaced_.empty() && shut_down_.empty();
  if (!whole || !alone) return false;
  if (!repeat_ || repeat_->slots != group.hits[0].slots) {
    learning_ = group.hits[0].slots;
    return false;
  }
  whole_ = group.hits[0];
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  return true;
}

void Coordinator::spread_whole(TimePoint now) {
  learning_.reset();
  if (!whole_) return;
  const wire::StampedHits hits = *std::exchange(whole_, std::nullopt);
  const RankRange world{0, static_cast<int>(reports_.size()) - 1};
  const Source source{{&world, 1}, sequence_, now};
  hits.slots.for_each([&](std::uint32_t slot) {
    accept_hit(source, slot, 0, wire::stamp_of_hit(hits.report_number, slot));
  });
}

std::optional<EncodedPlan> Coordinator::repeat_plan(TimePoint now, std::size_t in_flight) {
  if (!whole_) return std::nullopt;
  if (in_flight >= kBusyBatches && repeat_->bytes < options_.fusion_threshold) {
    spread_whole(now);
    return std::nullopt;
  }
  stalls_.note_activity(RankSet(0, static_cast<int>(reports_.size()) - 1),
                        cache_.at(whole_->slots.highest()).request.name, now);
  whole_.reset();
  repeat_->decoded.sequence = ++sequence_;
  note_change(now);
  // Twice the same in a row leaves the cache's order as it is.
  if (!std::exchange(repeat_->just_used, true)) {
    for (const auto& batch : repeat_->decoded.batches) {
      for (const auto& tensor : batch.tensors) cache_.touch(*tensor.slot);
    }
  }
  if (options_.schedule_lock) replay_if_steady(repeat_->decoded);
  EncodedPlan repeated{.plan = repeat_->decoded};
  repeated.bytes = repeated.plan.replay.empty() ? wire::renumber(repeat_->plan, sequence_)
                                                : wire::encode(repeated.plan);
  repeat_->decoded.replay.clear();
  return repeated;
}

std::optional<EncodedPlan> Coordinator::decide_encoded(TimePoint now, std::size_t in_flight) {
  if (auto repeated = repeat_plan(now, in_flight)) return repeated;
  auto plan = decide(now, in_flight);
  if (!plan) return std::nullopt;
  wire::Bytes bytes = wire::encode(*plan);
  return EncodedPlan{std::move(*plan), std::move(bytes)};
}

void Coordinator::learn_repeat(wire::Plan plan, std::int64_t bytes) {
  const std::optional<wire::SlotSet> asked = std::exchange(learning_, std::nullopt);
  if (!asked || plan.shutdown || !plan.errors.empty() || !table_.pending().empty()) return;
  wire::SlotSet planned;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      if (!tensor.slot || !batch.absent.empty()) return;
      planned.add(*tensor.slot);
    }
  }
  if (planned != *asked) return;
  plan.sequence = 0;
  wire::Bytes encoded = wire::encode(plan);
  repeat_ = {planned, std::move(encoded), std::move(plan), bytes, true};
}

void Coordinator::accept_group(const wire::MergedReport::Group& group, const Source& source,
                               bool joins) {
  if (!joins) {
    for (const auto& hits : group.hits) {
      hits.slots.for_each([&](std::uint32_t slot) {
        accept_hit(source, slot, 0, wire::stamp_of_hit(hits.report_number, slot));
      });
    }
    for (const auto& unnamed : group.unnamed_hits)
      accept_hit(source, unnamed.hit.slot, unnamed.hit.ordinal, unnamed.stamp);
  }
  for (const auto& stamped : group.requests) {
    if ((stamped.request.kind == OpKind::kJoin) != joins) continue;
    accept_request(source, {source.ranks, stamped.stamp, stamped.first_dims}, stamped.request);
  }
}

// Of what a rank did in a section one thing stands for all. Where groups overlap it is the one that
// comes first in the message.
void Coordinator::note_activity(const wire::MergedReport::Section& section, TimePoint now) {
  RankSet told;
  for (const auto& group : section.groups) {
    const RankSet ranks = difference(group.ranks, told);
    if (ranks.empty()) continue;
    told.add(ranks);
    const Source source{ranks, section.as_of, now};
    if (!group.requests.empty()) {
      stalls_.note_activity(ranks, group.requests.back().request.name, now);
    } else if (!group.unnamed_hits.empty()) {
      const wire::UnnamedHit& hit = group.unnamed_hits.back().hit;
      const OpKind kind = slot_as_seen(source, hit.slot).response.request.kind;
      stalls_.note_activity(ranks, wire::unnamed_name(kind, hit.ordinal), now);
    } else if (!group.hits.empty()) {
      stalls_.note_activity(
          ranks, slot_as_seen(source, group.hits.back().slots.highest()).response.request.name,
          now);
    }
  }
}

}  // namespace hvd::control
