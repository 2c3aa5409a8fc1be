#include <algorithm>

#include "control/coordinator.h"
#include "hvd/error.h"

namespace hvd::control {

void Coordinator::accept(const wire::MergedReport& merged, TimePoint now) {
  const RankRange world{0, static_cast<int>(reports_.size()) - 1};
  const auto check_ranks = [&](const RankSet& ranks) {
    if (!contains({&world, 1}, ranks)) {
      throw Error("a report came from rank " + std::to_string(ranks.highest()) + ", which does not exist");
    }
  };
  check_ranks(merged.leaving);
  for (const auto& applied : merged.applied) {
    check_ranks(applied.ranks);
    check_applied(applied.ranks, applied.last_applied);
  }
  for (const auto& section : merged.sections) {
    if (section.as_of > sequence_) {
      throw Error("a report refers to plan " + std::to_string(section.as_of) + "; the last is " + std::to_string(sequence_));
    }
    for (const auto& group : section.groups) check_ranks(group.ranks);
    // What a rank asks for before it joins lies anywhere in the section.
    for (const bool joins : {false, true}) {
      for (const auto& group : section.groups) accept_group(group, {group.ranks, section.as_of, now}, joins);
    }
    note_activity(section, now);
  }
  // Last: what the sections say was said before.
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  if (table_.anyone_joined()) table_.refresh_join(now);
  shut_down_.add(merged.leaving);
}

void Coordinator::accept_group(const wire::MergedReport::Group& group, const Source& source, bool joins) {
  if (!joins) {
    for (const auto& hits : group.hits) {
      hits.slots.for_each([&](std::uint32_t slot) { accept_hit(source, slot, 0, wire::stamp_of_hit(hits.report_number, slot)); });
    }
    for (const auto& unnamed : group.unnamed_hits) accept_hit(source, unnamed.hit.slot, unnamed.hit.ordinal, unnamed.stamp);
  }
  for (const auto& stamped : group.requests) {
    if ((stamped.request.kind == OpKind::kJoin) != joins) continue;
    accept_request(source, {source.ranks, stamped.stamp, stamped.first_dims}, stamped.request, std::nullopt);
  }
}

// Of what a rank did in a section one thing stands for all. Where groups overlap it is the one that comes first in the message.
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
      const OpKind kind = slot_as_seen(source, hit.slot).entry.request.kind;
      stalls_.note_activity(ranks, wire::unnamed_name(kind, hit.ordinal), now);
    } else if (!group.hits.empty()) {
      stalls_.note_activity(ranks, slot_as_seen(source, group.hits.back().slots.highest()).entry.request.name, now);
    }
  }
}

}  // namespace hvd::control
