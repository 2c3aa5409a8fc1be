#include "sim/runtime_program.h"

#include <algorithm>
#include <numeric>

namespace hvd::testing {

RandomProgram::RandomProgram(std::uint64_t seed, int ranks, ProgramShape shape)
    : shape_(shape),
      in_sequence_(seed % 2 == 1),
      ranks_(ranks),
      random_(seed),
      mixed_group_(seed % 4 == 1),
      steps_(static_cast<std::size_t>(ranks), shape.steady ? 16 : 3) {
  // Rank 0 always stays to the end, because it is the root of every rooted operation.
  if (shape_.joins) {
    for (int rank = 1; rank < ranks_; ++rank) {
      steps_[static_cast<std::size_t>(rank)] =
          shape_.steady ? 6 + static_cast<int>(random_() % 11) : static_cast<int>(random_() % 4);
    }
  }
  if (shape_.sets) add_sets();
  const int count =
      shape_.steady ? 2 + static_cast<int>(random_() % 6) : 4 + static_cast<int>(random_() % 12);
  for (int i = 0; i < count; ++i) add_random_operation(i);
}

void RandomProgram::add_sets() {
  const int count = 1 + static_cast<int>(random_() % 3);
  for (int i = 0; i < count; ++i) {
    std::vector<int> members = {0};
    for (int rank = 1; rank < ranks_; ++rank) {
      if (random_() % 2 == 0) members.push_back(rank);
    }
    sets_.push_back(std::move(members));
  }
}

void RandomProgram::add_random_operation(int index) {
  StepOperation operation;
  Submission& form = operation.form;
  operation.seed = random_();
  form.input.dtype = static_cast<DataType>(random_() % kDataTypeCount);
  form.input.shape = {static_cast<std::int64_t>(random_() % 5),
                      static_cast<std::int64_t>(1 + random_() % 700)};
  if (shape_.steady && index > 1 && random_() % 4 == 0)
    operation.every = 2 + static_cast<int>(random_() % 7);
  if (random_() % 4 != 0 || (shape_.steady && operation.every == 1))
    form.name = "tensor" + std::to_string(index);
  form.process_set = static_cast<int>(random_() % (sets_.size() + 1));
  if (form.process_set > 0) {
    operation.members = sets_[static_cast<std::size_t>(form.process_set) - 1];
  } else {
    operation.members.resize(static_cast<std::size_t>(ranks_));
    std::iota(operation.members.begin(), operation.members.end(), 0);
  }
  const auto draw = [this] { return random_(); };
  operation.parameters.kind = choose_kind(shape_.joins, draw);
  choose_form(operation, ranks_, shape_.joins, draw);
  if (!form.name.empty() && !operation.is_barrier() && index % 3 == 0 && form.process_set == 0 &&
      operation.every == 1)
    join_group(operation);
  operations_.push_back(std::move(operation));
}

/// Whether the operation can share a batch with similar ones.
bool RandomProgram::shares_batches(const StepOperation& operation) {
  const OpKind kind = operation.parameters.kind;
  if (kind == OpKind::kAllreduce) return operation.parameters.op != ReduceOp::kAdasum;
  return kind == OpKind::kAllgather || kind == OpKind::kBroadcast || kind == OpKind::kReducescatter;
}

void RandomProgram::join_group(StepOperation& operation) const {
  const auto first = std::find_if(operations_.begin(), operations_.end(),
                                  [](const StepOperation& one) { return !one.form.group.empty(); });
  const bool repeats = shape_.steady && !mixed_group_;
  if (repeats && !shares_batches(first == operations_.end() ? operation : *first)) return;
  if (repeats && first != operations_.end()) {
    const std::string name = operation.form.name;
    const std::uint64_t seed = operation.seed;
    operation = *first;
    operation.form.name = name;
    operation.seed = seed;
  }
  operation.form.group = "group";
}

std::vector<int> RandomProgram::contributors(const ProgramOperation& operation, int step) const {
  std::vector<int> found;
  for (const int rank : operation.members) {
    if (steps(rank) > step) found.push_back(rank);
  }
  return found;
}

ProgramRun::ProgramRun(const RandomProgram& program, runtime::Runtime& runtime, int rank,
                       std::uint64_t seed)
    : program_(program),
      runtime_(runtime),
      rank_(rank),
      random_(seed * 7919 + static_cast<std::uint64_t>(rank)) {}

Operation ProgramRun::submit_one(Submission submission) {
  std::vector<Submission> one;
  one.push_back(std::move(submission));
  return runtime_.submit(std::move(one), Progress::kBackground).front();
}

bool ProgramRun::finished() const noexcept {
  return step_ + 1 >= program_.steps(rank_) + (program_.joins() ? 1 : 0);
}

void ProgramRun::submit_next() {
  ++step_;
  slots_.clear();
  if (step_ < 0) return submit_sets();
  step_ == program_.steps(rank_) ? submit_join() : submit_step();
}

void ProgramRun::submit_sets() {
  for (const auto& members : program_.sets()) {
    slots_.emplace_back().operation = submit_one({.parameters = AddProcessSet{members}});
  }
}

void ProgramRun::submit_join() {
  slots_.emplace_back().operation = submit_one({.parameters = Join{}});
}

Submission ProgramRun::make_submission(std::size_t index) {
  const ProgramOperation& operation = program_.operations()[index];
  const bool of_one_size = !operation.is_barrier() && operation.rows.empty() &&
                           operation.parameters.kind != OpKind::kReducescatter;
  const bool in_place = of_one_size && random_() % 2 == 0;
  Submission submission = operation.submission(step_, rank_, slots_[index].memory, in_place);
  submission.in_sequence = program_.in_sequence();
  return submission;
}

void ProgramRun::submit_group(const std::vector<std::size_t>& members) {
  std::vector<Submission> submissions;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Submission submission = make_submission(members[i]);
    submission.group_size = static_cast<int>(members.size());
    submission.group_index = static_cast<int>(i);
    submissions.push_back(std::move(submission));
  }
  const auto handles = runtime_.submit(std::move(submissions), Progress::kBackground);
  for (std::size_t i = 0; i < members.size(); ++i) slots_[members[i]].operation = handles[i];
}

void ProgramRun::submit_step() {
  slots_.resize(program_.operations().size());
  std::vector<std::size_t> group, unnamed;
  std::vector<std::vector<std::size_t>> units;  // operations that are submitted at once
  for (std::size_t i = 0; i < program_.operations().size(); ++i) {
    const StepOperation& operation = program_.operations()[i];
    if (!operation.has_member(rank_) || !operation.is_in(step_)) continue;
    if (!operation.form.group.empty()) {
      group.push_back(i);
    } else if (operation.form.name.empty()) {
      unnamed.push_back(i);
      units.push_back({});  // the place of the next unnamed one, whichever that is
    } else {
      units.push_back({i});
    }
  }
  if (!group.empty()) units.push_back(group);
  std::shuffle(units.begin(), units.end(), random_);
  std::size_t next_unnamed = 0;
  for (const auto& unit : units) {
    const std::size_t index = unit.empty() ? unnamed[next_unnamed++] : unit[0];
    if (!program_.operations()[index].form.group.empty()) {
      submit_group(unit);
    } else {
      slots_[index].operation = submit_one(make_submission(index));
    }
  }
}

bool ProgramRun::done() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return !slot.operation.valid() || slot.operation.done();
  });
}

void ProgramRun::wait() const {
  for (const Slot& slot : slots_) {
    if (slot.operation.valid()) slot.operation.wait();
  }
}

std::string ProgramRun::check_agreed() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Operation& operation = slots_[i].operation;
    if (!operation.status().ok()) return operation.status().message;
    if (step_ < 0 && operation.result() != static_cast<std::int64_t>(i) + 1)
      return "wrong number of a process set";
    if (step_ >= 0 && (operation.result() < 0 || operation.result() >= program_.ranks()))
      return "wrong last rank to join";
  }
  return {};
}

std::string ProgramRun::check() const {
  const std::string here = "rank " + std::to_string(rank_) + " step " + std::to_string(step_);
  if (step_ < 0 || step_ == program_.steps(rank_)) {
    const std::string problem = check_agreed();
    return problem.empty() ? problem : here + ": " + problem;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].operation.valid()) continue;
    const ProgramOperation& operation = program_.operations()[i];
    const std::string where = here + " operation " + std::to_string(i) + " (" +
                              std::string(to_string(operation.parameters.kind)) + "): ";
    if (!slots_[i].operation.status().ok()) return where + slots_[i].operation.status().message;
    const std::string fault = operation.fault(step_, rank_, program_.contributors(operation, step_),
                                              slots_[i].memory->output);
    if (!fault.empty()) return where + fault;
  }
  return {};
}

}  // namespace hvd::testing
