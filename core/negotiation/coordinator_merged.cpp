#include <algorithm>
#include <utility>

#include "hvd/error.h"
#include "negotiation/aggregator.h"
#include "negotiation/coordinator.h"

namespace hvd::control {

void Coordinator::accept(const wire::MergedReport& merged, TimePoint now) {
  const RankRange world{0, static_cast<int>(reports_.size()) - 1};
  const auto check_ranks = [&](const RankSet& ranks) {
    if (!contains({&world, 1}, ranks)) {
      throw Error("a report came from rank " + std::to_string(ranks.highest()) +
                  ", which does not exist");
    }
  };
  spread_whole(now);
  check_ranks(merged.leaving);
  for (const auto& applied : merged.applied) {
    check_ranks(applied.ranks);
    progress_.check(applied.ranks, applied.last_applied, sequence_);
  }
  if (!merged.sections.empty() || !merged.leaving.empty()) blocked_.note_change(now);
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
  departures_.add(leaving_since(merged, replay_plan_));
  departures_.add_ended(merged.ended);
}

// See Note [The whole world at once] in repeated_plan.h.
bool Coordinator::take_whole(const wire::MergedReport& merged) {
  if (merged.sections.size() != 1 || merged.sections[0].groups.size() != 1 ||
      merged.sections[0].as_of > sequence_ || merged.sections[0].as_of < replay_plan_) {
    return false;
  }
  const wire::MergedReport::Group& group = merged.sections[0].groups[0];
  const bool whole = group.hits.size() == 1 && group.unnamed_hits.empty() &&
                     group.requests.empty() && merged.leaving.empty() &&
                     group.ranks == RankSet(0, static_cast<int>(reports_.size()) - 1);
  const bool alone = table_.pending().empty() && failed_uses_.empty() && former_slots_.empty() &&
                     departures_.none();
  if (!whole || !alone || !repeated_.offer(group.hits[0])) return false;
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  return true;
}

void Coordinator::spread_whole(TimePoint now) {
  const auto hits = repeated_.give_back();
  if (!hits) return;
  const RankRange world{0, static_cast<int>(reports_.size()) - 1};
  const Source source{{&world, 1}, sequence_, now};
  hits->slots.for_each([&](std::uint32_t slot) {
    accept_hit(source, slot, 0, wire::stamp_of_hit(hits->report_number, slot));
  });
}

// Some batch is of a sort that could gather. The ready table finds out whether it does.
bool Coordinator::may_hold_back_repeated(const BatchesAhead& ahead) const {
  return ahead && std::ranges::any_of(repeated_.plan().batches, [&](const wire::Batch& batch) {
           const wire::Request& request = cache_.at(*batch.tensors.front().slot).request;
           return fusion_sort(request) &&
                  ahead(request.process_set, request.device) >= kBusyBatches;
         });
}

std::optional<wire::Plan> Coordinator::repeat_plan(TimePoint now, const BatchesAhead& ahead) {
  if (!repeated_.waiting()) return std::nullopt;
  if (may_hold_back_repeated(ahead)) {
    spread_whole(now);
    return std::nullopt;
  }
  stalls_.note_activity(RankSet(0, static_cast<int>(reports_.size()) - 1),
                        cache_.at(repeated_.slots().highest()).request.name, now);
  wire::Plan repeated = repeated_.take(++sequence_, cache_);
  blocked_.note_change(now);
  if (options_.schedule_lock) replay_if_steady(repeated);
  return repeated;
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
      const OpKind kind = slot_as_seen(source, hit.slot).request.kind;
      stalls_.note_activity(ranks, wire::unnamed_name(kind, hit.ordinal), now);
    } else if (!group.hits.empty()) {
      stalls_.note_activity(
          ranks, slot_as_seen(source, group.hits.back().slots.highest()).request.name, now);
    }
  }
}

}  // namespace hvd::control
