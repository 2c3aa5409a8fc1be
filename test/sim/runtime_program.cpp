#include "sim/runtime_program.h"

#include <algorithm>
#include <numeric>

namespace hvd::testing {
namespace {

constexpr std::array kReductions = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

std::int64_t elements(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::uint64_t data_seed(const ProgramOperation& operation, int step) {
  return operation.seed * 31 + static_cast<std::uint64_t>(step);
}

}  // namespace

RandomProgram::RandomProgram(std::uint64_t seed, int ranks) : ranks_(ranks), random_(seed) {
  const int count = 4 + static_cast<int>(random_() % 12);
  for (int i = 0; i < count; ++i) add_random_operation(i);
}

void RandomProgram::add_random_operation(int index) {
  ProgramOperation operation;
  Submission& form = operation.form;
  operation.seed = random_();
  form.input.dtype = static_cast<DataType>(random_() % kDataTypeCount);
  form.input.shape = {static_cast<std::int64_t>(random_() % 5), static_cast<std::int64_t>(1 + random_() % 700)};
  if (random_() % 4 != 0) form.name = "tensor" + std::to_string(index);
  switch (random_() % 8) {
    case 0:
      form.kind = OpKind::kBarrier;
      operation.barrier = true;
      break;
    case 1:
    case 2:
      form.kind = OpKind::kAllgather;
      for (int rank = 0; rank < ranks_; ++rank) operation.rows.push_back(static_cast<std::int64_t>(random_() % 4));
      break;
    case 3:
      form.kind = OpKind::kBroadcast;
      form.root = static_cast<int>(random_() % static_cast<std::uint64_t>(ranks_));
      break;
    default:
      form.kind = OpKind::kAllreduce;
      form.op = kReductions[random_() % kReductions.size()];
      if (form.input.dtype == DataType::kBool && form.op == ReduceOp::kAverage) form.op = ReduceOp::kMax;
      if (form.input.dtype == DataType::kFloat32 && random_() % 2 == 0) form.prescale = 0.5;
      break;
  }
  if (!form.name.empty() && !operation.barrier && index % 3 == 0) form.group = "group";
  operations_.push_back(std::move(operation));
}

Bytes RandomProgram::input(const ProgramOperation& operation, int step, int rank) const {
  if (operation.barrier) return {};
  std::vector<std::int64_t> shape = operation.form.input.shape;
  if (!operation.rows.empty()) shape[0] = operation.rows[static_cast<std::size_t>(rank)];
  return make_input(elements(shape), operation.form.input.dtype, operation.form.op, rank, data_seed(operation, step));
}

Bytes RandomProgram::expected(const ProgramOperation& operation, int step) const {
  if (operation.barrier) return {};
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < ranks_; ++rank) inputs.push_back(input(operation, step, rank));
  const Submission& form = operation.form;
  if (form.kind == OpKind::kBroadcast) return inputs[static_cast<std::size_t>(form.root)];
  if (form.kind == OpKind::kAllgather) {
    Bytes all;
    for (const Bytes& part : inputs) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
  const bool average = form.op == ReduceOp::kAverage;
  return reference_reduce(inputs, form.input.dtype, average ? ReduceOp::kSum : form.op,
                          {form.prescale, form.postscale, average ? ranks_ : 1});
}

ProgramRun::ProgramRun(const RandomProgram& program, runtime::Runtime& runtime, int rank, std::uint64_t seed)
    : program_(program), runtime_(runtime), rank_(rank), random_(seed * 7919 + static_cast<std::uint64_t>(rank)) {}

Submission ProgramRun::make_submission(std::size_t index) {
  const ProgramOperation& operation = program_.operations()[index];
  Slot& slot = slots_[index];
  Submission submission = operation.form;
  slot.input = program_.input(operation, step_, rank_);
  if (operation.barrier) return submission;
  if (!operation.rows.empty()) submission.input.shape[0] = operation.rows[static_cast<std::size_t>(rank_)];
  submission.input.count = elements(submission.input.shape);
  submission.input.data = slot.input.data();
  if (submission.kind == OpKind::kAllgather) {
    submission.allocate_output = [output = slot.output, form = submission.input](const OutputSizes& sizes) {
      TensorView view = form;
      view.shape[0] = std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
      view.count = elements(view.shape);
      output->resize(view.bytes());
      view.data = output->data();
      return view;
    };
  } else if (random_() % 2 == 0) {  // in place
    *slot.output = slot.input;
    submission.input.data = slot.output->data();
    submission.output = submission.input;
  } else {
    slot.output->resize(slot.input.size());
    submission.output = submission.input;
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
  ++step_;
  slots_.clear();
  slots_.resize(program_.operations().size());
  std::vector<std::size_t> group, unnamed;
  std::vector<std::vector<std::size_t>> units;  // what is submitted at once
  for (std::size_t i = 0; i < program_.operations().size(); ++i) {
    const Submission& form = program_.operations()[i].form;
    if (!form.group.empty()) {
      group.push_back(i);
    } else if (form.name.empty()) {
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
      continue;
    }
    std::vector<Submission> one;
    one.push_back(make_submission(index));
    slots_[index].operation = runtime_.submit(std::move(one), Progress::kBackground).front();
  }
}

bool ProgramRun::step_done() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.operation.done(); });
}

void ProgramRun::wait_step() const {
  for (const Slot& slot : slots_) slot.operation.wait();
}

std::string ProgramRun::check_step() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ProgramOperation& operation = program_.operations()[i];
    const std::string where = "rank " + std::to_string(rank_) + " step " + std::to_string(step_) + " operation " + std::to_string(i) + ": ";
    if (!slots_[i].operation.status().ok()) return where + slots_[i].operation.status().message;
    if (operation.barrier) continue;
    const Bytes expected = program_.expected(operation, step_);
    if (slots_[i].output->size() != expected.size()) return where + "wrong size";
    const auto at = first_difference(slots_[i].output->data(), expected, operation.form.input.dtype);
    if (at >= 0) return where + "element " + std::to_string(at) + " is wrong";
  }
  return {};
}

}  // namespace hvd::testing
