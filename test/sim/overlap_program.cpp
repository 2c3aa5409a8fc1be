#include "sim/overlap_program.h"

#include <algorithm>
#include <utility>

#include "support/float_operation.h"

namespace hvd::testing {
namespace {

constexpr int kUses = 40;
constexpr std::size_t kElements = 8;

}  // namespace

OverlapProgram::OverlapProgram(std::uint64_t seed, int ranks) : ranks_(ranks), random_(seed) {
  const int count = 2 + static_cast<int>(random_() % 4);
  for (int i = 0; i < count; ++i)
    units_.push_back({.members = {{"op" + std::to_string(i), any_op()}}, .uses = kUses});
  if (random_() % 2 == 0) add_group();
  const bool unnamed_group = units_.back().members.size() > 1 && units_.back().group.empty();
  // Ranks make unnamed calls in one order, so a program has at most one unnamed unit.
  if (!unnamed_group && random_() % 3 == 0)
    units_.push_back({.members = {{"", ReduceOp::kSum}}, .uses = kUses});
  if (random_() % 3 == 0)
    units_[random_() % units_.size()].fails_every = 4 + static_cast<int>(random_() % 12);
  add_rare_units();
}

// Adds a group that runs in one batch, or a group with different reductions that runs in several
// batches.
void OverlapProgram::add_group() {
  const bool mixed = random_() % 2 == 0;
  const bool named = random_() % 4 != 0;
  OverlapUnit unit{.group = named ? "group" : "", .uses = kUses};
  const int members = 2 + static_cast<int>(random_() % 2);
  for (int i = 0; i < members; ++i) {
    unit.members.push_back({named ? "member" + std::to_string(i) : "",
                            mixed && i == 1 ? ReduceOp::kMax : ReduceOp::kSum});
  }
  units_.push_back(std::move(unit));
}

void OverlapProgram::add_rare_units() {
  const auto pace = [this] { return 5 + static_cast<int>(random_() % 30); };
  const bool new_names = random_() % 2 == 0;
  const int extra = pace();
  units_.push_back({.members = {{"extra", ReduceOp::kSum}},
                    .uses = kUses / extra,
                    .pace = extra,
                    .new_names = new_names,
                    .fails_every = random_() % 2 == 0 ? 2 : 0});
  if (random_() % 2 == 0) return;
  const int of_set = pace();
  units_.push_back({.members = {{"subset", any_op()}},
                    .in_subset = true,
                    .uses = kUses / of_set,
                    .pace = of_set,
                    .fails_every = random_() % 3 == 0 ? 3 : 0});
}

float OverlapProgram::expected(const OverlapUnit& unit, const OverlapUnit::Member& member,
                               int use) const {
  const int ranks = unit.in_subset ? 2 : ranks_;
  const int of_ranks = member.op == ReduceOp::kMax ? ranks : ranks * (ranks + 1) / 2;
  return static_cast<float>((use + 1) * of_ranks);
}

OverlapRun::OverlapRun(const OverlapProgram& program, runtime::Runtime& runtime, int rank,
                       std::uint64_t seed)
    : program_(program),
      runtime_(runtime),
      rank_(rank),
      random_(seed * 7919 + static_cast<std::uint64_t>(rank)),
      progress_(program.units().size()) {}

void OverlapRun::submit_set() {
  std::vector<Submission> one;
  one.push_back({.parameters = AddProcessSet{{0, 1}}});
  set_ = runtime_.submit(std::move(one), hvd::Progress::kBackground).front();
}

void OverlapRun::go_on() {
  if (!set_.done()) return;
  for (std::size_t unit = 0; unit < progress_.size(); ++unit) {
    settle(unit);
    if (may_begin(unit) && random_() % 3 != 0) submit(unit);
  }
}

bool OverlapRun::finished() const {
  for (std::size_t unit = 0; unit < progress_.size(); ++unit) {
    const OverlapUnit& form = program_.units()[unit];
    if (takes_part(form) && progress_[unit].use < form.uses) return false;
  }
  return true;
}

bool OverlapRun::may_begin(std::size_t unit) const {
  const OverlapUnit& form = program_.units()[unit];
  const Progress& progress = progress_[unit];
  return takes_part(form) && progress.operations.empty() && progress.use < form.uses &&
         progress_.front().use >= progress.use * form.pace;
}

void OverlapRun::submit(std::size_t unit) {
  const OverlapUnit& form = program_.units()[unit];
  Progress& progress = progress_[unit];
  const bool asks_otherwise = rank_ == 0 && form.fails(progress.use);
  progress.data.assign(form.members.size(), {});
  std::vector<Submission> submissions;
  for (std::size_t i = 0; i < form.members.size(); ++i) {
    const OverlapUnit::Member& member = form.members[i];
    progress.data[i].assign(kElements + (asks_otherwise && i == 0 ? 1 : 0),
                            static_cast<float>((rank_ + 1) * (progress.use + 1)));
    const std::string name =
        form.new_names ? member.name + std::to_string(progress.use) : member.name;
    Submission submission = float_operation(progress.data[i], name);
    submission.parameters = Allreduce{.op = member.op};
    submission.process_set = form.in_subset ? 1 : 0;
    if (form.members.size() > 1) {
      submission.group = form.group;
      submission.group_size = static_cast<int>(form.members.size());
      submission.group_index = static_cast<int>(i);
    }
    submissions.push_back(std::move(submission));
  }
  for (const Operation& operation :
       runtime_.submit(std::move(submissions), hvd::Progress::kBackground))
    progress.operations.push_back(operation);
}

void OverlapRun::settle(std::size_t unit) {
  Progress& progress = progress_[unit];
  const auto done = [](const Operation& operation) { return operation.done(); };
  if (progress.operations.empty() || !std::ranges::all_of(progress.operations, done)) return;
  for (std::size_t i = 0; i < progress.operations.size(); ++i)
    check(program_.units()[unit], i, progress);
  progress.operations.clear();
  ++progress.use;
}

void OverlapRun::check(const OverlapUnit& unit, std::size_t member, const Progress& progress) {
  if (!problem_.empty()) return;
  const OverlapUnit::Member& form = unit.members[member];
  const std::string what = "'" + form.name + "' of rank " + std::to_string(rank_) + ", use " +
                           std::to_string(progress.use) + ": ";
  const Status status = progress.operations[member].status();
  const bool failed = status.code == StatusCode::kMismatch;
  if (unit.fails(progress.use)) {
    if (!failed) problem_ = what + "expected a mismatch, got '" + status.message + "'";
    return;
  }
  const std::vector<float>& data = progress.data[member];
  const float expected = program_.expected(unit, form, progress.use);
  const bool right = std::ranges::all_of(data, [&](float one) { return one == expected; });
  if (!status.ok()) {
    problem_ = what + status.message;
  } else if (!right) {
    problem_ =
        what + "is " + std::to_string(data.back()) + ", expected " + std::to_string(expected);
  }
}

}  // namespace hvd::testing
