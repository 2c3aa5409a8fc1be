#include "negotiation/aggregator.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"
#include "hvd/error.h"

namespace hvd::control {

// Note [Holding reports back]
// An operation runs when every member of its process set has requested it. As long as one member
// below this rank has not, the coordinator cannot plan the operation, and the requests of the other
// members are held back. When the last member requests it, one entry for the whole subtree is
// forwarded at once. When all ranks of the job have requested an operation, no rank holds it back,
// so no plan is delayed.
//
// This works only if every member below requests the operation, and in the same way. That is not
// certain in the following cases. All held reports are then forwarded at once, and later ones as
// they arrive (PassThrough), until plans have ended each operation that was forwarded in parts:
//   - a rank joins (it requests no more operations, and others do not wait for it) or leaves;
//   - a cached name is requested in full, so that some ranks may hit and others send requests;
//   - a report refers to the cache before the epoch, or an epoch begins while reports are held;
//   - a report was held for longest_hold, because of a stall or a late rank. An overdue report of
//     a child counts as held for as long here.
// To the other ranks, holding a report back looks like a delay in a slow network. It can never lead
// to a wrong plan; the rules above only avoid useless waits.

namespace {

std::vector<std::int64_t> expand(const std::vector<wire::DimRun>& runs) {
  std::vector<std::int64_t> dims;
  for (const wire::DimRun& run : runs)
    dims.insert(dims.end(), static_cast<std::size_t>(run.ranks), run.dim);
  return dims;
}

// @pre a and b have no rank in common
std::vector<wire::DimRun> merge_dims(RankSpan a, const std::vector<wire::DimRun>& dims_of_a,
                                     RankSpan b, const std::vector<wire::DimRun>& dims_of_b) {
  HVD_EXPECT(!intersects(a, b), "no rank is in both sets");
  if (dims_of_a.empty()) return {};
  if (dims_of_a.size() == 1 && dims_of_b.size() == 1 && dims_of_a[0].dim == dims_of_b[0].dim) {
    return {{dims_of_a[0].dim, dims_of_a[0].ranks + dims_of_b[0].ranks}};
  }
  RankSet both(a);
  both.add(b);
  const std::vector<std::int64_t> each_of_a = expand(dims_of_a);
  const std::vector<std::int64_t> each_of_b = expand(dims_of_b);
  auto next_of_a = each_of_a.begin();
  auto next_of_b = each_of_b.begin();
  std::vector<wire::DimRun> merged;
  for_each_rank(both, [&](int rank) {
    const std::int64_t dim = contains(a, rank) ? *next_of_a++ : *next_of_b++;
    if (merged.empty() || merged.back().dim != dim) merged.push_back({dim, 0});
    ++merged.back().ranks;
  });
  return merged;
}

// Whether the requests are equal. The first dimension of a gathering operation may differ.
bool same_request(const wire::Request& a, const wire::Request& b) {
  if (!wire::gathers(a.kind) || a.shape.empty() || b.shape.empty()) return a == b;
  wire::Request alike = b;
  alike.shape[0] = a.shape[0];
  return a == alike;
}

wire::Report::Group& group_of(wire::Report::Section& section, const RankSet& ranks) {
  constexpr std::size_t kMaxCompared = 16;
  const std::size_t compared = std::min(kMaxCompared, section.groups.size());
  const auto found = std::find_if(section.groups.rbegin(),
                                  section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared),
                                  [&](const auto& group) { return group.ranks == ranks; });
  if (found != section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared)) return *found;
  section.groups.push_back({ranks});
  return section.groups.back();
}

}  // namespace

RankSpan SubtreeMembers::of(int process_set) {
  if (process_set == 0) return subtree_;
  const auto known = of_set_.find(process_set);
  if (known != of_set_.end()) return known->second;
  // A removed set has no members, so its operations are not held back.
  RankSet members =
      sets_.contains(process_set) ? intersection(sets_.rank_set(process_set), subtree_) : RankSet();
  return of_set_.emplace(process_set, std::move(members)).first->second;
}

std::optional<TimePoint> HeldReports::oldest() const {
  std::optional<TimePoint> oldest;
  for (const Hits& hits : hits_) oldest = std::min(oldest.value_or(hits.since), hits.since);
  for (const Named& named : named_) oldest = std::min(oldest.value_or(named.since), named.since);
  return oldest;
}

// Hits are kept in classes of slots that the same ranks have reported. A report with only some
// slots of a class splits it.
bool HeldReports::add_hits(wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                           int process_set, TimePoint now, SubtreeMembers& members) {
  bool complete = false;
  const auto add_to = [&](Hits& hits) {
    if (ranks.front().first < hits.ranks.lowest()) hits.report_number = report_number;
    hits.ranks.add(ranks);
    complete = complete || members.complete(hits.ranks, hits.process_set);
  };
  const std::size_t classes = hits_.size();
  for (std::size_t i = 0; i < classes && !slots.empty(); ++i) {
    if (hits_[i].process_set != process_set || intersects(hits_[i].ranks, ranks)) continue;
    if (hits_[i].slots == slots) {
      add_to(hits_[i]);
      return complete;
    }
    wire::SlotSet common = hits_[i].slots;
    common.intersect(slots);
    if (common.empty()) continue;
    slots.remove(common);
    if (common == hits_[i].slots) {
      add_to(hits_[i]);
      continue;
    }
    hits_[i].slots.remove(common);
    Hits part = hits_[i];
    part.slots = std::move(common);
    add_to(part);
    hits_.push_back(std::move(part));
  }
  if (slots.empty()) return complete;
  hits_.push_back({std::move(slots), RankSet(ranks), report_number, process_set, now});
  return complete || members.complete(ranks, process_set);
}

bool HeldReports::add_named(std::string key, int process_set, Variant variant, TimePoint now,
                            SubtreeMembers& members) {
  const auto [found, is_new] = by_key_.try_emplace(std::move(key), named_.size());
  if (is_new) named_.push_back({found->first, process_set, {}, {}, now});
  Named& named = named_[found->second];
  named.requested_by.add(variant.ranks);
  const auto same =
      std::find_if(named.variants.begin(), named.variants.end(), [&](const Variant& known) {
        return known.hit == variant.hit &&
               same_request(known.request.request, variant.request.request) &&
               !intersects(known.ranks, variant.ranks);
      });
  if (same == named.variants.end()) {
    named.variants.push_back(std::move(variant));
  } else {
    auto dims = merge_dims(same->ranks, same->request.first_dims, variant.ranks,
                           variant.request.first_dims);
    if (variant.ranks.lowest() < same->ranks.lowest()) same->request = std::move(variant.request);
    same->request.first_dims = std::move(dims);
    same->ranks.add(variant.ranks);
  }
  return members.complete(named.requested_by, process_set);
}

void HeldReports::move_out(Hits& hits, wire::Report::Section& section) {
  group_of(section, hits.ranks).hits.push_back({hits.report_number, std::move(hits.slots)});
}

void HeldReports::move_out(Named& named, wire::Report::Section& section) {
  for (Variant& variant : named.variants) {
    auto& group = group_of(section, variant.ranks);
    if (variant.hit) {
      group.unnamed_hits.push_back({variant.request.stamp, *variant.hit});
    } else {
      group.requests.push_back(std::move(variant.request));
    }
  }
}

void HeldReports::move_complete(wire::Report::Section& section, SubtreeMembers& members) {
  std::erase_if(hits_, [&](Hits& hits) {
    const bool goes = members.complete(hits.ranks, hits.process_set);
    if (goes) move_out(hits, section);
    return goes;
  });
  const std::size_t before = named_.size();
  std::erase_if(named_, [&](Named& named) {
    const bool goes = members.complete(named.requested_by, named.process_set);
    if (goes) move_out(named, section);
    return goes;
  });
  if (named_.size() == before) return;
  by_key_.clear();
  for (std::size_t i = 0; i < named_.size(); ++i) by_key_.emplace(named_[i].key, i);
}

HeldReports::InParts HeldReports::move_all(wire::Report::Section& section,
                                           SubtreeMembers* members) {
  InParts in_parts;
  for (Hits& hits : hits_) {
    if (members == nullptr || !members->complete(hits.ranks, hits.process_set))
      in_parts.slots.add(hits.slots);
    move_out(hits, section);
  }
  for (Named& named : named_) {
    if (members == nullptr || !members->complete(named.requested_by, named.process_set))
      in_parts.keys.push_back(named.key);
    move_out(named, section);
  }
  hits_.clear();
  named_.clear();
  by_key_.clear();
  return in_parts;
}

namespace {

constexpr std::uint64_t kPlansToRemember = 64;

std::string key_of(const wire::Request& request) {
  return tensor_key(request.process_set, request.name);
}

}  // namespace

void PassThrough::stop_if_done() noexcept {
  if (!anyone_left_ && !joining_ && !in_parts()) active_ = false;
}

void PassThrough::start_join(const std::string& name) {
  active_ = joining_ = true;
  join_name_ = name;
}

void PassThrough::remember(const HeldReports::InParts& in_parts, std::uint64_t as_of,
                           std::uint64_t last_applied) {
  if (in_parts.slots.empty() && in_parts.keys.empty()) return;
  remembered_at_ = last_applied;
  keys_.insert(in_parts.keys.begin(), in_parts.keys.end());
  in_parts.slots.for_each([&](std::uint32_t slot) {
    if (const wire::Response* const former = cache_.find_displaced(slot, as_of)) {
      keys_.insert(key_of(former->request));
    } else if (cache_.holds(slot)) {
      slots_.add(slot);
    }
  });
}

void PassThrough::forget(int process_set, const std::string& name, std::uint64_t as_of) {
  keys_.erase(tensor_key(process_set, name));
  wire::SlotSet done;
  slots_.for_each([&](std::uint32_t slot) {
    const wire::Request& request = cache_.find(slot, as_of)->request;
    if (request.process_set == process_set && request.name == name) done.add(slot);
  });
  slots_.remove(done);
}

// A slot in a plan refers to the response that it held before that plan, because a plan has each
// name at most once.
void PassThrough::forget(const wire::PlannedTensor& tensor, std::uint64_t as_of) {
  if (const auto* const response = std::get_if<wire::Response>(&tensor))
    return forget(response->request.process_set, response->request.name, as_of);
  const auto& [slot, ordinal] = std::get<wire::SlotUse>(tensor);
  slots_.remove(slot);
  const wire::Response* const held = cache_.find(slot, as_of);
  if (keys_.empty() || held == nullptr) return;
  const wire::Request& request = held->request;
  keys_.erase(request.unnamed
                  ? tensor_key(request.process_set, wire::unnamed_name(request, ordinal))
                  : key_of(request));
}

void PassThrough::apply(const wire::Plan& plan) {
  const std::uint64_t as_of = plan.sequence - 1;
  for (const auto& error : plan.errors) {
    forget(error.process_set, error.name, as_of);
    if (error.name == join_name_) joining_ = false;
  }
  const bool remembers = in_parts();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      const auto* const response = std::get_if<wire::Response>(&tensor);
      if (response != nullptr && response->request.kind == OpKind::kJoin) joining_ = false;
      if (remembers) forget(tensor, as_of);
    }
  }
  // If a request and the plan with its error cross on the way, the coordinator ignores the request,
  // so no plan ends it. Such requests are forgotten after some plans.
  if (plan.sequence < remembered_at_ + kPlansToRemember) return;
  slots_ = {};
  keys_.clear();
}

void PassThrough::follow_displaced(std::uint64_t plan) {
  const wire::SlotSet slots = slots_;
  slots.for_each([&](std::uint32_t slot) {
    const wire::Response* const former = cache_.find_displaced(slot, plan - 1);
    if (former == nullptr) return;
    slots_.remove(slot);
    keys_.insert(key_of(former->request));
  });
}

void PassThrough::drop_removed(const ProcessSetTable& sets) {
  std::erase_if(keys_, [&](const std::string& key) {
    return !key.empty() && sets.was_removed(std::stoi(key));
  });
}

void PassThrough::reset() {
  slots_ = {};
  keys_.clear();
  active_ = anyone_left_ = joining_ = false;
}

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
      pass_through_(state.cache()) {}

void Aggregator::accept(wire::Report merged, TimePoint now) {
  for (const auto& applied : merged.applied) record_applied(applied.ranks, applied.last_applied);
  const RankSet leaving = leaving_since(merged, replay_plan_);
  leaving_.add(leaving);
  ended_.add(intersection(merged.ended, leaving));
  if (merged.overdue) forward_overdue();
  if (merged.sections.empty()) acknowledged_ = true;
  if (merged.sections.empty() || keep_if_equal(merged.sections, now)) return;
  for (auto& section : merged.sections) {
    if (section.groups.empty() || section.as_of < replay_plan_) continue;
    HeldReports& held = held_as_of(section.as_of);
    for (auto& group : section.groups) add_group(held, std::move(group), section.as_of, now);
    if (held.empty()) held_.erase(std::min(section.as_of, epoch_));
  }
}

void Aggregator::add_group(HeldReports& held, wire::Report::Group group, std::uint64_t as_of,
                           TimePoint now) {
  for (auto& hits : group.hits)
    add_hits(held, std::move(hits.slots), group.ranks, hits.report_number, now);
  for (const auto& hit : group.unnamed_hits) add_unnamed_hit(held, hit, group.ranks, as_of, now);
  for (auto& asked : group.requests) add_request(held, std::move(asked), group.ranks, now);
}

// See Note [Equal reports] in equal_reports.h. If it returns false, no equal reports are kept any
// more, and all groups have their items.
bool Aggregator::keep_if_equal(std::vector<wire::Report::Section>& sections, TimePoint now) {
  stop_if_done();
  wire::Report::Section& first = sections.front();
  const bool alone = sections.size() == 1 && first.groups.size() == 1 && first.as_of >= epoch_ &&
                     held_.empty() && !passing_through();
  if (alone && equal_.add(first.groups.front())) return true;
  if (alone && equal_.empty() && may_keep(first.groups.front(), first.as_of)) {
    equal_.begin(std::move(first.groups.front()), now);
    return true;
  }
  for (auto& section : sections)
    for (auto& group : section.groups) equal_.restore(group);
  release_equal();
  return false;
}

// Only operations of all ranks that need none of the rules of Note [Holding reports back].
bool Aggregator::may_keep(const wire::Report::Group& group, std::uint64_t as_of) const {
  const auto slots_of_all = [&](const wire::StampedHits& hits) {
    wire::SlotSet of_others = hits.slots;
    of_others.intersect(state_.cache().slots_of_other_sets());
    return of_others.empty();
  };
  const auto hit_of_all = [&](const wire::StampedUnnamedHit& unnamed) {
    const wire::Response* const cached = state_.cache().find(unnamed.hit.slot, as_of);
    return cached != nullptr && cached->request.process_set == 0;
  };
  const auto request_of_all = [&](const wire::StampedRequest& asked) {
    const wire::Request& request = asked.request;
    return request.process_set == 0 && request.kind != OpKind::kJoin && asked.first_dims.empty() &&
           (request.unnamed || !state_.cache().find(request));
  };
  return std::ranges::all_of(group.hits, slots_of_all) &&
         std::ranges::all_of(group.unnamed_hits, hit_of_all) &&
         std::ranges::all_of(group.requests, request_of_all);
}

void Aggregator::release_equal() {
  if (equal_.empty()) return;
  const TimePoint since = equal_.since();
  add_group(held_[epoch_], equal_.take(), epoch_, since);
}

HeldReports& Aggregator::held_as_of(std::uint64_t as_of) {
  stop_if_done();
  if (as_of < epoch_) pass_through_.start();
  return held_[std::min(as_of, epoch_)];
}

void Aggregator::record_applied(RankSpan ranks, std::uint64_t last_applied) {
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
  const wire::Response* const cached = state_.cache().find(hit.hit.slot, as_of);
  if (cached == nullptr) {  // the coordinator reports the error
    pass_through_.start();
    return add_named(held, {}, 0, std::move(variant), now);
  }
  const wire::Request& alike = cached->request;
  add_named(held, tensor_key(alike.process_set, wire::unnamed_name(alike, hit.hit.ordinal)),
            alike.process_set, std::move(variant), now);
}

void Aggregator::add_request(HeldReports& held, wire::StampedRequest asked, RankSpan ranks,
                             TimePoint now) {
  const wire::Request& request = asked.request;
  if (request.kind == OpKind::kJoin) pass_through_.start_join(request.name);
  if (pass_through_.joining() || (!request.unnamed && state_.cache().find(request)))
    pass_through_.start();
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
  if (!equal_.empty()) oldest = equal_.since();  // then no other report is held
  if (!oldest) return std::nullopt;
  return passing_through() ? *oldest : *oldest + longest_hold_;
}

std::optional<wire::Report> Aggregator::next_report(TimePoint now) {
  if (!leaving_.empty()) pass_through_.start_leave();
  stop_if_done();
  if (!passing_through()) {
    if (const auto limit = deadline(); limit && *limit <= now) forward_overdue();
  }
  if (passing_through()) release_equal();
  const bool equal_complete = !equal_.empty() && members_.complete(equal_.group().ranks, 0);
  const bool anything = (passing_through() ? !held_.empty() : anything_complete_) ||
                        equal_complete || acknowledged_ || overdue_ || !leaving_.empty();
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
  if (equal_complete) {
    wire::Report::Section section{epoch_};
    section.groups.push_back(equal_.take());
    report.sections.push_back(std::move(section));
  }
  acknowledged_ = anything_complete_ = false;
  return report;
}

void Aggregator::move_out(HeldReports& held, wire::Report::Section& section) {
  const bool of_epoch = section.as_of == epoch_;
  if (passing_through()) {
    pass_through_.remember(held.move_all(section, of_epoch ? &members_ : nullptr), section.as_of,
                           state_.last_applied());
  } else if (of_epoch) {
    held.move_complete(section, members_);
  }
}

void Aggregator::forward_overdue() noexcept {
  overdue_ = true;
  pass_through_.start();
}

void Aggregator::stop_if_done() noexcept {
  if (!holds_anything() && !overdue_) pass_through_.stop_if_done();
}

void Aggregator::apply(const wire::Plan& plan) {
  HVD_EXPECT(state_.last_applied() == plan.sequence, "the negotiator has applied the plan");
  bool new_epoch = !plan.errors.empty() || !plan.replay.empty();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors)
      new_epoch = new_epoch || !std::holds_alternative<wire::SlotUse>(tensor);
  }
  pass_through_.apply(plan);
  if (!plan.replay.empty()) forget_for_replay(plan.sequence);
  if (new_epoch) begin_epoch(plan.sequence);
}

// The ranks submit everything again, during the replay or after it.
void Aggregator::forget_for_replay(std::uint64_t sequence) {
  replay_plan_ = sequence;
  held_.clear();
  equal_.clear();
  leaving_ = {};
  ended_ = {};
  anything_complete_ = overdue_ = false;
  pass_through_.reset();
}

void Aggregator::begin_epoch(std::uint64_t sequence) {
  release_equal();
  if (!held_.empty()) pass_through_.start();
  epoch_ = sequence;
  members_.forget_sets();
  pass_through_.follow_displaced(sequence);
  pass_through_.drop_removed(state_.process_sets());
}

}  // namespace hvd::control
