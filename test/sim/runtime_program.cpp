#include "sim/runtime_program.h"

#include <algorithm>
#include <numeric>

namespace hvd::testing {
namespace {

constexpr std::array kReductions = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin,
                                    ReduceOp::kMax, ReduceOp::kProduct};

std::int64_t elements(std::span<const std::int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::uint64_t data_seed(const ProgramOperation& operation, int step) {
  return operation.seed * 31 + static_cast<std::uint64_t>(step);
}

}  // namespace

bool ProgramOperation::has_member(int rank) const {
  return std::binary_search(members.begin(), members.end(), rank);
}

RandomProgram::RandomProgram(std::uint64_t seed, int ranks, ProgramShape shape)
    : shape_(shape),
      ranks_(ranks),
      random_(seed),
      steps_(static_cast<std::size_t>(ranks), shape.steady ? 16 : 3) {
  // Rank 0 always stays to the end: it is the root wherever there is one.
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
  ProgramOperation operation;
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
  choose_kind(operation);
  if (!form.name.empty() && !operation.barrier && index % 3 == 0 && form.process_set == 0 &&
      operation.every == 1)
    form.group = "group";
  operations_.push_back(std::move(operation));
}

void RandomProgram::choose_kind(ProgramOperation& operation) {
  Submission& form = operation.form;
  constexpr std::array kKinds = {OpKind::kBarrier,       OpKind::kAllgather,     OpKind::kAllgather,
                                 OpKind::kBroadcast,     OpKind::kAllreduce,     OpKind::kAllreduce,
                                 OpKind::kAllreduce,     OpKind::kAllreduce,     OpKind::kGather,
                                 OpKind::kReducescatter, OpKind::kReducescatter, OpKind::kAlltoall};
  form.kind = kKinds[random_() % (kKinds.size() - (shape_.joins ? 1 : 0))];
  operation.barrier = form.kind == OpKind::kBarrier;
  if (form.kind == OpKind::kBroadcast || form.kind == OpKind::kGather) {
    form.root = shape_.joins ? 0 : operation.members[random_() % operation.members.size()];
  }
  if (wire::gathers(form.kind)) {
    for (int rank = 0; rank < ranks_; ++rank)
      operation.rows.push_back(static_cast<std::int64_t>(random_() % 4));
  }
  if (form.kind == OpKind::kAlltoall) {
    for (int rank = 0; rank < ranks_; ++rank) {
      std::vector<std::int64_t> splits;
      for (std::size_t i = 0; i < operation.members.size(); ++i)
        splits.push_back(static_cast<std::int64_t>(random_() % 3));
      operation.rows.push_back(std::accumulate(splits.begin(), splits.end(), std::int64_t{0}));
      operation.splits.push_back(std::move(splits));
    }
  }
  if (form.kind != OpKind::kAllreduce && form.kind != OpKind::kReducescatter) return;
  form.op = kReductions[random_() % kReductions.size()];
  if (form.input.dtype == DataType::kBool && form.op == ReduceOp::kAverage)
    form.op = ReduceOp::kMax;
  if (form.input.dtype == DataType::kFloat32 && random_() % 2 == 0) form.prescale = 0.5;
  if (form.input.dtype == DataType::kFloat32 && form.kind == OpKind::kAllreduce)
    form.compression = static_cast<Compression>(random_() % kCompressionCount);
}

Bytes RandomProgram::input(const ProgramOperation& operation, int step, int rank) const {
  if (operation.barrier) return {};
  Shape shape = operation.form.input.shape;
  if (!operation.rows.empty()) shape[0] = operation.rows[static_cast<std::size_t>(rank)];
  return make_input(elements(shape), operation.form.input.dtype, operation.form.op, rank,
                    data_seed(operation, step));
}

std::vector<int> RandomProgram::contributors(const ProgramOperation& operation, int step) const {
  std::vector<int> found;
  for (const int rank : operation.members) {
    if (steps(rank) > step) found.push_back(rank);
  }
  return found;
}

Bytes RandomProgram::expected_reduction(const ProgramOperation& operation, int step) const {
  std::vector<Bytes> inputs;
  for (const int rank : contributors(operation, step))
    inputs.push_back(input(operation, step, rank));
  const Submission& form = operation.form;
  const bool average = form.op == ReduceOp::kAverage;
  if (form.compression != Compression::kNone)
    return reference_compressed(inputs, form.compression, form.op, form.prescale, form.postscale);
  return reference_reduce(
      inputs, form.input.dtype, average ? ReduceOp::kSum : form.op,
      {form.prescale, form.postscale, average ? static_cast<std::int64_t>(inputs.size()) : 1});
}

// Every member's block for this rank, in rank order.
Bytes RandomProgram::expected_exchange(const ProgramOperation& operation, int step,
                                       int rank) const {
  const auto to = std::lower_bound(operation.members.begin(), operation.members.end(), rank) -
                  operation.members.begin();
  const auto row =
      static_cast<std::size_t>(operation.form.input.shape[1]) * size_of(operation.form.input.dtype);
  Bytes all;
  for (const int from : operation.members) {
    const auto& splits = operation.splits[static_cast<std::size_t>(from)];
    const Bytes sent = input(operation, step, from);
    const auto first =
        static_cast<std::ptrdiff_t>(static_cast<std::size_t>(std::accumulate(
                                        splits.begin(), splits.begin() + to, std::int64_t{0})) *
                                    row);
    const auto size = static_cast<std::ptrdiff_t>(
        static_cast<std::size_t>(splits[static_cast<std::size_t>(to)]) * row);
    all.insert(all.end(), sent.begin() + first, sent.begin() + first + size);
  }
  return all;
}

Bytes RandomProgram::expected(const ProgramOperation& operation, int step, int rank) const {
  const Submission& form = operation.form;
  const int members = static_cast<int>(operation.members.size());
  switch (form.kind) {
    case OpKind::kBroadcast:
      return input(operation, step, form.root);
    case OpKind::kAllreduce:
      return expected_reduction(operation, step);
    case OpKind::kAlltoall:
      return expected_exchange(operation, step, rank);
    case OpKind::kReducescatter: {
      const Bytes all = expected_reduction(operation, step);
      const auto row = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(form.input.shape[1]) *
                                                   size_of(form.input.dtype));
      std::ptrdiff_t first = 0;
      for (int position = 0; operation.members[static_cast<std::size_t>(position)] != rank;
           ++position) {
        first += rows_of_member(form.input.shape[0], members, position) * row;
      }
      const auto position =
          std::lower_bound(operation.members.begin(), operation.members.end(), rank) -
          operation.members.begin();
      return {all.begin() + first,
              all.begin() + first +
                  rows_of_member(form.input.shape[0], members, static_cast<int>(position)) * row};
    }
    case OpKind::kAllgather:
    case OpKind::kGather: {
      Bytes all;
      if (form.kind == OpKind::kGather && rank != form.root) return all;
      for (const int from : contributors(operation, step)) {
        const Bytes part = input(operation, step, from);
        all.insert(all.end(), part.begin(), part.end());
      }
      return all;
    }
    default:
      return {};
  }
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
    Submission submission;
    submission.kind = OpKind::kAddProcessSet;
    submission.splits.assign(members.begin(), members.end());
    slots_.emplace_back().operation = submit_one(std::move(submission));
  }
}

void ProgramRun::submit_join() {
  Submission submission;
  submission.kind = OpKind::kJoin;
  slots_.emplace_back().operation = submit_one(std::move(submission));
}

Submission ProgramRun::make_submission(std::size_t index) {
  const ProgramOperation& operation = program_.operations()[index];
  Slot& slot = slots_[index];
  Submission submission = operation.form;
  slot.input = program_.input(operation, step_, rank_);
  if (operation.barrier) return submission;
  if (!operation.rows.empty())
    submission.input.shape[0] = operation.rows[static_cast<std::size_t>(rank_)];
  if (!operation.splits.empty())
    submission.splits = operation.splits[static_cast<std::size_t>(rank_)];
  submission.input.count = elements(submission.input.shape);
  submission.input.data = slot.input.data();
  if (!operation.rows.empty()) {
    submission.allocate_output = [output = slot.output,
                                  form = submission.input](const OutputSizes& sizes) {
      TensorView view = form;
      view.shape[0] =
          std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
      view.count = elements(view.shape);
      output->resize(view.bytes());
      view.data = output->data();
      return view;
    };
  } else if (submission.kind != OpKind::kReducescatter && random_() % 2 == 0) {  // in place
    *slot.output = slot.input;
    submission.input.data = slot.output->data();
    submission.output = submission.input;
  } else {
    slot.output->resize(program_.expected(operation, step_, rank_).size());
    submission.output = submission.input;
    submission.output.count =
        static_cast<std::int64_t>(slot.output->size() / size_of(submission.input.dtype));
    submission.output.data = slot.output->data();
  }
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
  std::vector<std::vector<std::size_t>> units;  // what is submitted at once
  for (std::size_t i = 0; i < program_.operations().size(); ++i) {
    const ProgramOperation& operation = program_.operations()[i];
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
                              std::string(to_string(operation.form.kind)) + "): ";
    if (!slots_[i].operation.status().ok()) return where + slots_[i].operation.status().message;
    if (operation.barrier) continue;
    const Bytes expected = program_.expected(operation, step_, rank_);
    if (slots_[i].output->size() != expected.size()) return where + "wrong size";
    const auto at =
        first_difference(slots_[i].output->data(), expected, operation.form.input.dtype);
    if (at >= 0) return where + "element " + std::to_string(at) + " is wrong";
  }
  return {};
}

}  // namespace hvd::testing
