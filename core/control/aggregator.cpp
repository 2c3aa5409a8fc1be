#include "control/aggregator.h"

#include <algorithm>
#include <utility>

#include "control/tensor_key.h"
#include "hvd/error.h"

namespace hvd::control {
namespace {

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

constexpr std::uint64_t kPlansToRemember = 64;

void append_dims(std::vector<wire::DimRun>& runs, std::int64_t dim, int ranks) {
  if (!runs.empty() && runs.back().dim == dim) {
    runs.back().ranks += ranks;
  } else {
    runs.push_back({dim, ranks});
  }
}

class DimReader {
 public:
  explicit DimReader(const std::vector<wire::DimRun>& runs) : runs_(runs) {}
  std::int64_t next() {
    const std::int64_t dim = runs_[run_].dim;
    if (++used_ == runs_[run_].ranks) {
      ++run_;
      used_ = 0;
    }
    return dim;
  }

 private:
  const std::vector<wire::DimRun>& runs_;
  std::size_t run_ = 0;
  int used_ = 0;
};

// @pre a and b have no rank in common
std::vector<wire::DimRun> merge_dims(RankSpan a, const std::vector<wire::DimRun>& dims_of_a,
                                     RankSpan b, const std::vector<wire::DimRun>& dims_of_b) {
  if (dims_of_a.empty()) return {};
  if (dims_of_a.size() == 1 && dims_of_b.size() == 1 && dims_of_a[0].dim == dims_of_b[0].dim) {
    return {{dims_of_a[0].dim, dims_of_a[0].ranks + dims_of_b[0].ranks}};
  }
  RankSet both(a);
  both.add(b);
  DimReader from_a(dims_of_a);
  DimReader from_b(dims_of_b);
  std::vector<wire::DimRun> merged;
  for_each_rank(both, [&](int rank) {
    append_dims(merged, (contains(a, rank) ? from_a : from_b).next(), 1);
  });
  return merged;
}

// The first dimension of what gathers is each rank's own.
bool same_request(const wire::Request& a, const wire::Request& b) {
  if (!wire::gathers(a.kind) || a.shape.empty() || b.shape.empty()) return a == b;
  wire::Request alike = b;
  alike.shape[0] = a.shape[0];
  return a == alike;
}

wire::MergedReport::Group& group_of(wire::MergedReport::Section& section, const RankSet& ranks) {
  constexpr std::size_t kMostCompared = 16;
  const std::size_t compared = std::min(kMostCompared, section.groups.size());
  const auto found = std::find_if(section.groups.rbegin(),
                                  section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared),
                                  [&](const auto& group) { return group.ranks == ranks; });
  if (found != section.groups.rbegin() + static_cast<std::ptrdiff_t>(compared)) return *found;
  section.groups.push_back({ranks});
  return section.groups.back();
}

}  // namespace

RankSet leaving_since(const wire::MergedReport& merged, std::uint64_t replay_plan) {
  RankSet leaving = merged.leaving;
  for (const auto& applied : merged.applied) {
    if (applied.last_applied < replay_plan) leaving.remove(applied.ranks);
  }
  return leaving;
}

Aggregator::Aggregator(RankSet subtree, const Negotiator& state, Duration longest_hold)
    : subtree_(std::move(subtree)), state_(state), longest_hold_(longest_hold) {}

void Aggregator::accept(int rank, const wire::Report& report, TimePoint now) {
  const RankRange one{rank, rank};
  const RankSpan ranks{&one, 1};
  note_applied(ranks, report.last_applied);
  // The rank takes all this back when it comes to the replay, as the coordinator knows: see
  // ScheduleReplay.
  if (report.last_applied < replay_plan_) return;
  const std::uint64_t number = ++report_numbers_[rank];
  if (report.shutdown) leaving_.add(ranks);
  if (report.ended) ended_.add(ranks);
  if (report.cached.empty() && report.cached_unnamed.empty() && report.requests.empty()) {
    acknowledged_ = true;
    return;
  }
  Store& store = store_for(report.last_applied);
  if (!report.cached.empty()) add_hits(store, wire::SlotSet(report.cached), ranks, number, now);
  for (std::size_t i = 0; i < report.cached_unnamed.size(); ++i) {
    add_unnamed_hit(store, {wire::stamp_of_unnamed_hit(number, i), report.cached_unnamed[i]}, ranks,
                    report.last_applied, now);
  }
  for (std::size_t i = 0; i < report.requests.size(); ++i) {
    wire::StampedRequest asked{wire::stamp_of_request(number, i), report.requests[i]};
    if (wire::gathers(asked.request.kind) && !asked.request.shape.empty())
      asked.first_dims = {{asked.request.shape[0], 1}};
    add_request(store, std::move(asked), ranks, now);
  }
}

void Aggregator::accept(const wire::MergedReport& merged, TimePoint now) {
  for (const auto& applied : merged.applied) note_applied(applied.ranks, applied.last_applied);
  leaving_.add(leaving_since(merged, replay_plan_));
  ended_.add(merged.ended);
  if (merged.overdue) open_ = overdue_ = true;
  if (merged.sections.empty()) acknowledged_ = true;
  for (const auto& section : merged.sections) {
    if (section.groups.empty() || section.as_of < replay_plan_) continue;
    Store& store = store_for(section.as_of);
    for (const auto& group : section.groups) {
      for (const auto& hits : group.hits)
        add_hits(store, hits.slots, group.ranks, hits.report_number, now);
      for (const auto& hit : group.unnamed_hits)
        add_unnamed_hit(store, hit, group.ranks, section.as_of, now);
      for (const auto& asked : group.requests) add_request(store, asked, group.ranks, now);
    }
    if (store.empty()) stores_.erase(std::min(section.as_of, epoch_));
  }
}

Aggregator::Store& Aggregator::store_for(std::uint64_t as_of) {
  close_if_done();
  if (as_of < epoch_) open_ = true;
  return stores_[std::min(as_of, epoch_)];
}

void Aggregator::note_applied(RankSpan ranks, std::uint64_t last_applied) {
  for (auto& [sequence, known] : applied_) {
    if (sequence != last_applied) known.remove(ranks);
  }
  applied_[last_applied].add(ranks);
}

RankSpan Aggregator::expected(int process_set) {
  if (process_set == 0) return subtree_;
  const auto known = expected_.find(process_set);
  if (known != expected_.end()) return known->second;
  const ProcessSetTable& sets = state_.process_sets();
  // Of a set that is no more nothing is worth waiting for.
  RankSet members =
      sets.contains(process_set) ? intersection(sets.rank_set(process_set), subtree_) : RankSet();
  return expected_.emplace(process_set, std::move(members)).first->second;
}

void Aggregator::add_hits(Store& store, wire::SlotSet slots, RankSpan ranks,
                          std::uint64_t report_number, TimePoint now) {
  if (!foreign_slots_.empty()) {
    wire::SlotSet foreign = slots;
    foreign.intersect(foreign_slots_);
    slots.remove(foreign);
    foreign.for_each([&](std::uint32_t slot) {
      wire::SlotSet one;
      one.add(slot);
      add_hits_of_set(store, std::move(one), ranks, report_number,
                      state_.cache().at(slot).request.process_set, now);
    });
  }
  if (!slots.empty()) add_hits_of_set(store, std::move(slots), ranks, report_number, 0, now);
}

// Hits fall into classes of slots that the same ranks have reported; a report that has only some of
// a class's slots splits it.
void Aggregator::add_hits_of_set(Store& store, wire::SlotSet slots, RankSpan ranks,
                                 std::uint64_t report_number, int process_set, TimePoint now) {
  const auto add_to = [&](Hits& hits) {
    if (ranks.front().first < hits.ranks.lowest()) hits.report_number = report_number;
    hits.ranks.add(ranks);
    anything_complete_ = anything_complete_ || complete(hits.ranks, hits.process_set);
  };
  const std::size_t classes = store.hits.size();
  for (std::size_t i = 0; i < classes && !slots.empty(); ++i) {
    if (store.hits[i].process_set != process_set || intersects(store.hits[i].ranks, ranks))
      continue;
    if (store.hits[i].slots == slots) return add_to(store.hits[i]);
    wire::SlotSet common = store.hits[i].slots;
    common.intersect(slots);
    if (common.empty()) continue;
    slots.remove(common);
    if (common == store.hits[i].slots) {
      add_to(store.hits[i]);
      continue;
    }
    store.hits[i].slots.remove(common);
    Hits part = store.hits[i];
    part.slots = std::move(common);
    add_to(part);
    store.hits.push_back(std::move(part));
  }
  if (slots.empty()) return;
  store.hits.push_back({std::move(slots), RankSet(ranks), report_number, process_set, now});
  anything_complete_ = anything_complete_ || complete(ranks, process_set);
}

// As Coordinator does it: see Note [What a slot means].
const Aggregator::Meaning* Aggregator::meaning_of(std::uint32_t slot, std::uint64_t as_of) const {
  if (const auto history = former_meanings_.find(slot); history != former_meanings_.end()) {
    for (const FormerMeaning& former : history->second) {
      if (former.until > as_of) return &former.meaning;
    }
  }
  return slot < meanings_.size() ? &meanings_[slot] : nullptr;
}

void Aggregator::add_unnamed_hit(Store& store, const wire::StampedUnnamedHit& hit, RankSpan ranks,
                                 std::uint64_t as_of, TimePoint now) {
  Variant variant{RankSet(ranks), hit.hit, {hit.stamp}};
  const Meaning* const meaning = meaning_of(hit.hit.slot, as_of);
  if (meaning == nullptr) {  // the coordinator will say what is wrong
    open_ = true;
    return add_named(store, {}, 0, std::move(variant), now);
  }
  add_named(store,
            tensor_key(meaning->process_set, wire::unnamed_name(meaning->kind, hit.hit.ordinal)),
            meaning->process_set, std::move(variant), now);
}

void Aggregator::add_request(Store& store, wire::StampedRequest asked, RankSpan ranks,
                             TimePoint now) {
  const wire::Request& request = asked.request;
  if (request.kind == OpKind::kJoin) {
    joining_ = true;
    join_name_ = request.name;
  }
  if (joining_ || (!request.unnamed && state_.cache().find(request))) open_ = true;
  std::string key = tensor_key(request.process_set, request.name);
  const int process_set = request.process_set;
  add_named(store, std::move(key), process_set, {RankSet(ranks), std::nullopt, std::move(asked)},
            now);
}

void Aggregator::add_named(Store& store, std::string key, int process_set, Variant variant,
                           TimePoint now) {
  const auto [found, is_new] = store.by_key.try_emplace(std::move(key), store.named.size());
  if (is_new) store.named.push_back({found->first, process_set, {}, {}, now});
  Named& named = store.named[found->second];
  named.said.add(variant.ranks);
  const auto same =
      std::find_if(named.variants.begin(), named.variants.end(), [&](const Variant& known) {
        return known.hit == variant.hit &&
               same_request(known.asked.request, variant.asked.request) &&
               !intersects(known.ranks, variant.ranks);
      });
  if (same == named.variants.end()) {
    named.variants.push_back(std::move(variant));
  } else {
    auto dims =
        merge_dims(same->ranks, same->asked.first_dims, variant.ranks, variant.asked.first_dims);
    if (variant.ranks.lowest() < same->ranks.lowest()) same->asked = std::move(variant.asked);
    same->asked.first_dims = std::move(dims);
    same->ranks.add(variant.ranks);
  }
  anything_complete_ = anything_complete_ || complete(named.said, process_set);
}

std::optional<TimePoint> Aggregator::deadline() const {
  std::optional<TimePoint> oldest;
  for (const auto& [as_of, store] : stores_) {
    for (const Hits& hits : store.hits) oldest = std::min(oldest.value_or(hits.since), hits.since);
    for (const Named& named : store.named)
      oldest = std::min(oldest.value_or(named.since), named.since);
  }
  if (!oldest) return std::nullopt;
  return open_ ? *oldest : *oldest + longest_hold_;
}

std::optional<wire::MergedReport> Aggregator::take(TimePoint now) {
  if (!leaving_.empty()) open_ = anyone_left_ = true;
  close_if_done();
  if (!open_) {
    if (const auto limit = deadline(); limit && *limit <= now) open_ = overdue_ = true;
  }
  const bool anything = (open_ ? !stores_.empty() : anything_complete_) || acknowledged_ ||
                        overdue_ || !leaving_.empty();
  if (!anything) return std::nullopt;
  wire::MergedReport report;
  report.overdue = std::exchange(overdue_, false);
  report.leaving = std::exchange(leaving_, {});
  report.ended = std::exchange(ended_, {});
  for (auto& [sequence, ranks] : std::exchange(applied_, {})) {
    if (!ranks.empty()) report.applied.push_back({sequence, std::move(ranks)});
  }
  for (auto store = stores_.begin(); store != stores_.end();) {
    wire::MergedReport::Section section{store->first};
    move_out(store->second, section);
    if (!section.groups.empty()) report.sections.push_back(std::move(section));
    store = store->second.empty() ? stores_.erase(store) : std::next(store);
  }
  acknowledged_ = anything_complete_ = false;
  return report;
}

void Aggregator::move_out(Store& store, wire::MergedReport::Section& section) {
  const bool of_epoch = section.as_of == epoch_;
  std::erase_if(store.hits, [&](Hits& hits) {
    const bool is_complete = of_epoch && complete(hits.ranks, hits.process_set);
    if (!open_ && !is_complete) return false;
    if (!is_complete) remember(hits, section.as_of);
    group_of(section, hits.ranks).hits.push_back({hits.report_number, std::move(hits.slots)});
    return true;
  });
  const std::size_t before = store.named.size();
  std::erase_if(store.named, [&](Named& named) {
    const bool is_complete = of_epoch && complete(named.said, named.process_set);
    if (!open_ && !is_complete) return false;
    if (!is_complete) {
      open_names_.insert(named.key);
      remembered_at_ = state_.last_applied();
    }
    for (Variant& variant : named.variants) {
      auto& group = group_of(section, variant.ranks);
      if (variant.hit) {
        group.unnamed_hits.push_back({variant.asked.stamp, *variant.hit});
      } else {
        group.requests.push_back(std::move(variant.asked));
      }
    }
    return true;
  });
  if (store.named.size() == before) return;
  store.by_key.clear();
  for (std::size_t i = 0; i < store.named.size(); ++i) store.by_key.emplace(store.named[i].key, i);
}

void Aggregator::remember(const Hits& hits, std::uint64_t as_of) {
  remembered_at_ = state_.last_applied();
  hits.slots.for_each([&](std::uint32_t slot) {
    const Meaning* const meaning = meaning_of(slot, as_of);
    if (meaning == nullptr) return;
    if (meaning == &meanings_[slot]) {
      open_slots_.add(slot);
    } else {
      open_names_.insert(tensor_key(meaning->process_set, meaning->name));
    }
  });
}

void Aggregator::close_if_done() {
  if (open_ && stores_.empty() && !overdue_ && !anyone_left_ && !joining_ && open_slots_.empty() &&
      open_names_.empty())
    open_ = false;
}

void Aggregator::forget(int process_set, const std::string& name) {
  open_names_.erase(tensor_key(process_set, name));
  wire::SlotSet done;
  open_slots_.for_each([&](std::uint32_t slot) {
    if (meanings_[slot].process_set == process_set && meanings_[slot].name == name) done.add(slot);
  });
  open_slots_.remove(done);
}

// A slot in a plan means what it meant before that plan: a name is planned once.
void Aggregator::forget(const wire::PlannedTensor& tensor) {
  if (!tensor.slot) return forget(tensor.request.process_set, tensor.request.name);
  open_slots_.remove(*tensor.slot);
  if (open_names_.empty() || *tensor.slot >= meanings_.size()) return;
  const Meaning& meaning = meanings_[*tensor.slot];
  open_names_.erase(tensor_key(
      meaning.process_set,
      meaning.name.empty() ? wire::unnamed_name(meaning.kind, tensor.ordinal) : meaning.name));
}

void Aggregator::note_plan(const wire::Plan& plan) {
  bool new_epoch = !plan.errors.empty() || !plan.replay.empty();
  for (const auto& error : plan.errors) {
    forget(error.process_set, error.name);
    if (error.name == join_name_) joining_ = false;
  }
  const bool remembers = !open_slots_.empty() || !open_names_.empty();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      new_epoch = new_epoch || !tensor.slot;
      if (!tensor.slot && tensor.request.kind == OpKind::kJoin) joining_ = false;
      if (remembers) forget(tensor);
    }
  }
  if (!plan.replay.empty()) forget_for_replay(plan.sequence);
  if (new_epoch) begin_epoch(plan.sequence);
  // Some of it no plan will ever name: the coordinator ignores what crosses an error on its way.
  if (plan.sequence < remembered_at_ + kPlansToRemember) return;
  open_slots_ = {};
  open_names_.clear();
}

// Whoever has asked for any of it asks again, after the replay or under it.
void Aggregator::forget_for_replay(std::uint64_t sequence) {
  replay_plan_ = sequence;
  stores_.clear();
  leaving_ = {};
  ended_ = {};
  open_slots_ = {};
  open_names_.clear();
  anything_complete_ = anyone_left_ = overdue_ = joining_ = open_ = false;
}

void Aggregator::begin_epoch(std::uint64_t sequence) {
  if (!stores_.empty()) open_ = true;
  epoch_ = sequence;
  expected_.clear();
  foreign_slots_ = {};
  const ResponseCache& cache = state_.cache();
  for (std::uint32_t slot = 0; slot < cache.size(); ++slot) {
    const wire::Request& request = cache.at(slot).request;
    if (request.process_set != 0) foreign_slots_.add(slot);
    Meaning now{request.process_set, request.unnamed ? std::string() : request.name, request.kind};
    if (slot == meanings_.size()) {
      meanings_.push_back(std::move(now));
      continue;
    }
    if (meanings_[slot] == now) continue;
    Meaning former = std::exchange(meanings_[slot], std::move(now));
    if (open_slots_.contains(slot)) {
      open_slots_.remove(slot);
      open_names_.insert(tensor_key(former.process_set, former.name));
    }
    former_meanings_[slot].push_back({std::move(former), sequence});
  }
  std::erase_if(former_meanings_, [&](auto& of_slot) {
    return of_slot.second.back().until + kPlansToRemember <= sequence;
  });
  const ProcessSetTable& sets = state_.process_sets();
  std::erase_if(open_names_, [&](const std::string& key) {
    return !key.empty() && sets.was_removed(std::stoi(key));
  });
}

}  // namespace hvd::control
