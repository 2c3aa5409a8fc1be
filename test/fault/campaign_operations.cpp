#include "fault/campaign_operations.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace hvd::campaign {
namespace {

constexpr int kPeriod = 5;
constexpr std::array kTypes = {DataType::kFloat32, DataType::kFloat64, DataType::kInt32,
                               DataType::kInt64};
constexpr std::array kKinds = {OpKind::kAllreduce, OpKind::kAllreduce,     OpKind::kAllgather,
                               OpKind::kBroadcast, OpKind::kReducescatter, OpKind::kAlltoall};

// Small enough for every result to be exact, in whatever order it is reduced.
double value(const Spec& spec, int rank, std::int64_t index) {
  return (rank + 1.0) * static_cast<double>((index + spec.salt) % kPeriod + 1);
}

template <class Visit>
void with_type(DataType type, const Visit& visit) {
  switch (type) {
    case DataType::kFloat64:
      return visit(double{});
    case DataType::kInt32:
      return visit(std::int32_t{});
    case DataType::kInt64:
      return visit(std::int64_t{});
    default:
      return visit(float{});
  }
}

std::int64_t split(const Spec& spec, int from, int to) { return (from + 2 * to + spec.ragged) % 3; }

std::int64_t rows_on(const Spec& spec, int rank) {
  if (spec.kind == OpKind::kAllgather) return (rank + spec.ragged) % 4;
  if (spec.kind != OpKind::kAlltoall) return spec.rows;
  std::int64_t rows = 0;
  for (const int to : spec.members) rows += split(spec, rank, to);
  return rows;
}

int position_in(const Spec& spec, int rank) {
  return static_cast<int>(std::lower_bound(spec.members.begin(), spec.members.end(), rank) -
                          spec.members.begin());
}

double reduce_two(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

/// The reduced value of each residue of the index.
std::array<double, kPeriod> reduced(const Spec& spec) {
  std::array<double, kPeriod> results{};
  for (std::size_t i = 0; i < results.size(); ++i) {
    double result = 0;
    for (const int rank : spec.contributors) {
      const double own = value(spec, rank, static_cast<std::int64_t>(i)) * spec.prescale;
      result = rank == spec.contributors.front() ? own : reduce_two(spec.op, result, own);
    }
    if (spec.op == ReduceOp::kAverage) result /= static_cast<double>(spec.contributors.size());
    results[i] = result * spec.postscale;
  }
  return results;
}

/// All elements of the result on this rank.
std::vector<double> expected(const Spec& spec, int rank) {
  std::vector<double> all;
  const auto append = [&](int source, std::int64_t first_row, std::int64_t rows) {
    for (std::int64_t i = first_row * spec.columns; i < (first_row + rows) * spec.columns; ++i)
      all.push_back(value(spec, source, i));
  };
  const auto append_reduced = [&](std::int64_t first_row, std::int64_t rows) {
    const auto results = reduced(spec);
    for (std::int64_t i = first_row * spec.columns; i < (first_row + rows) * spec.columns; ++i)
      all.push_back(results[static_cast<std::size_t>(i % kPeriod)]);
  };
  const auto members = static_cast<int>(spec.members.size());
  const int own = position_in(spec, rank);
  switch (spec.kind) {
    case OpKind::kBroadcast:
      append(spec.root, 0, spec.rows);
      break;
    case OpKind::kAllgather:
      for (const int source : spec.contributors) append(source, 0, rows_on(spec, source));
      break;
    case OpKind::kReducescatter: {
      std::int64_t first = 0;
      for (int before = 0; before < own; ++before)
        first += rows_of_member(spec.rows, members, before);
      append_reduced(first, rows_of_member(spec.rows, members, own));
      break;
    }
    case OpKind::kAlltoall:
      for (const int source : spec.members) {
        std::int64_t first = 0;
        for (const int to : spec.members) {
          if (to < rank) first += split(spec, source, to);
        }
        append(source, first, split(spec, source, rank));
      }
      break;
    default:
      append_reduced(0, spec.rows);
  }
  return all;
}

std::int64_t some_rows(Random& random) {
  switch (random.below(6)) {
    case 0:
      return 1;
    case 1:
      return 7;
    case 2:
      return 125;
    case 3:
      return 4'099;
    case 4:
      return 65'537;
    default:
      return 300'000;
  }
}

void choose_numbers(Spec& spec, Random& random) {
  spec.dtype = kTypes[static_cast<std::size_t>(random.below(4))];
  spec.root =
      spec.members[static_cast<std::size_t>(random.below(static_cast<int>(spec.members.size())))];
  spec.rows = some_rows(random);
  if (spec.kind == OpKind::kReducescatter) spec.rows = random.below(14);
  if (spec.kind != OpKind::kAllreduce) spec.columns = 1 + random.below(40);
  if (spec.rows > 10'000) spec.columns = 1 + random.below(2);
  spec.ragged = random.below(12);
  const bool floating = spec.dtype == DataType::kFloat32 || spec.dtype == DataType::kFloat64;
  constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                               ReduceOp::kAverage};
  spec.op = kOps[static_cast<std::size_t>(random.below(floating ? 5 : 4))];
  if (floating && spec.op == ReduceOp::kSum && random.chance(30))
    spec.prescale = 0.5, spec.postscale = 4;
}

Spec on_set(const Plan& plan, Set set) {
  Spec spec;
  spec.set = set;
  if (set == Set::kSubset) {
    spec.members = plan.subset;
  } else {
    spec.members.resize(static_cast<std::size_t>(plan.ranks));
    std::iota(spec.members.begin(), spec.members.end(), 0);
  }
  spec.contributors = spec.members;
  return spec;
}

Spec random_operation(const Plan& plan, Random& random) {
  Spec spec = on_set(plan, random.chance(30) ? Set::kSubset : Set::kWorld);
  spec.kind = kKinds[static_cast<std::size_t>(random.below(kKinds.size()))];
  choose_numbers(spec, random);
  return spec;
}

bool about_group(Difference difference) {
  return difference == Difference::kGroupName || difference == Difference::kGroupSize ||
         difference == Difference::kGroupIndex || difference == Difference::kUngrouped ||
         difference == Difference::kOneOfGroup;
}

/// What the victim may disagree about; submitted in every step, so that it is cached by then and
/// used again afterwards.
void add_disputed(const Plan& plan, std::vector<Spec>& operations) {
  Random random(plan.seed, 7);
  const bool in_subset = plan.victim_in_subset() && plan.subset.size() > 1 && random.chance(40);
  Spec spec = on_set(plan, in_subset ? Set::kSubset : Set::kWorld);
  spec.key = "disputed";
  spec.rows = random.chance(50) ? 6 : 5'000;
  spec.kind = random.chance(70) ? OpKind::kAllreduce : OpKind::kReducescatter;
  spec.root = spec.members.front();
  if (plan.difference == Difference::kRoot) spec.kind = OpKind::kBroadcast;
  if (!about_group(plan.difference) || plan.fault != Fault::kDisagree)
    return operations.push_back(spec);
  spec.kind = OpKind::kAllreduce;
  spec.group = "disputed";
  spec.group_size = 2;
  for (int index = 0; index < 2; ++index) {
    spec.key = "disputed." + std::to_string(index);
    spec.group_index = index;
    operations.push_back(spec);
  }
}

void add_group(const Plan& plan, Random& random, bool unnamed, std::vector<Spec>& operations) {
  Spec spec = on_set(plan, random.chance(30) ? Set::kSubset : Set::kWorld);
  spec.unnamed = unnamed;
  spec.group = unnamed ? "" : "layer";
  spec.group_size = 2 + random.below(2);
  for (int index = 0; index < spec.group_size; ++index) {
    spec.group_index = index;
    spec.key = (unnamed ? "unnamed." : "layer.") + std::to_string(index);
    spec.rows = some_rows(random);
    operations.push_back(spec);
  }
}

}  // namespace

std::vector<Spec> operations_of_step(const Plan& plan, int epoch, int step) {
  std::vector<Spec> operations;
  Random fixed(plan.seed, 1);
  const int count = 3 + fixed.below(4);
  for (int i = 0; i < count; ++i) {
    operations.push_back(random_operation(plan, fixed));
    operations.back().key = "fixed" + std::to_string(i);
    operations.back().unnamed = fixed.chance(25);
  }
  add_disputed(plan, operations);
  Random fresh(plan.seed, static_cast<std::uint64_t>(100 + epoch * 50 + step));
  if (fresh.chance(60)) {
    operations.push_back(random_operation(plan, fresh));
    operations.back().key = fresh.chance(50) ? "fresh" : "fresh" + std::to_string(step);
  }
  if (fresh.chance(40)) add_group(plan, fresh, fresh.chance(40), operations);
  const bool transfer =
      plan.moment == Moment::kInTransfer && epoch == plan.epoch && step == plan.step;
  if (transfer || fresh.chance(10)) {
    Spec large = on_set(plan, Set::kWorld);
    large.key = "large";
    large.rows = transfer ? 4'000'003 : 1'000'003;
    operations.push_back(large);
  }
  for (std::size_t i = 0; i < operations.size(); ++i)
    operations[i].salt = static_cast<int>(i) + 3 * step + epoch;
  return operations;
}

std::vector<Spec> operations_of_extra_step(const Plan& plan, int epoch, int step, int extra) {
  std::vector<Spec> operations;
  Random random(plan.seed, static_cast<std::uint64_t>(1000 + epoch * 50 + extra));
  for (int i = 0; i < 3; ++i) {
    Spec spec = on_set(plan, Set::kWorld);
    spec.kind = i == 1 ? OpKind::kAllgather : OpKind::kAllreduce;
    choose_numbers(spec, random);
    spec.key = "extra" + std::to_string(extra) + '.' + std::to_string(i);
    spec.unnamed = i == 2;
    spec.salt = i + step;
    std::erase_if(spec.contributors,
                  [&](int rank) { return plan.extra[static_cast<std::size_t>(rank)] < extra; });
    operations.push_back(spec);
  }
  return operations;
}

std::vector<std::size_t> order_on(int rank, const std::vector<Spec>& operations, const Plan& plan,
                                  int epoch, int step) {
  std::vector<std::size_t> order(operations.size());
  std::iota(order.begin(), order.end(), 0U);
  Random random(plan.seed, static_cast<std::uint64_t>(2000 + (epoch * 50 + step) * 8 + rank));
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<int>(i)))]);
  }
  std::vector<std::size_t> unnamed;
  for (const std::size_t index : order) {
    if (operations[index].unnamed) unnamed.push_back(index);
  }
  std::sort(unnamed.begin(), unnamed.end());
  auto next = unnamed.begin();
  for (std::size_t& index : order) {
    if (operations[index].unnamed) index = *next++;
  }
  return order;
}

bool concerned(const Spec& spec, const Plan& plan) {
  if (!spec.key.starts_with("disputed")) return false;
  if (plan.fault == Fault::kWrongKind) return true;
  if (plan.fault != Fault::kDisagree || plan.difference == Difference::kMembersOfSet) return false;
  return plan.difference != Difference::kOneOfGroup || spec.group_index == 1;
}

Spec sabotaged(const Spec& right, const Plan& plan) {
  Spec spec = right;
  if (plan.fault == Fault::kWrongKind) {
    constexpr std::array kOthers = {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAlltoall,
                                    OpKind::kBarrier};
    spec.kind = kOthers[static_cast<std::size_t>(plan.position) % kOthers.size()];
    return spec;
  }
  switch (plan.difference) {
    case Difference::kShape:
    case Difference::kOneOfGroup:
      ++spec.rows;
      break;
    case Difference::kDtype:
      spec.dtype = DataType::kFloat64;
      break;
    case Difference::kOp:
      spec.op = ReduceOp::kMax;
      break;
    case Difference::kRoot:
      spec.root = spec.members.back();
      break;
    case Difference::kScale:
      spec.postscale = 2;
      break;
    case Difference::kGroupName:
      spec.group = "other";
      break;
    case Difference::kGroupSize:
      ++spec.group_size;
      break;
    case Difference::kGroupIndex:
      spec.group_index = 1 - spec.group_index;
      break;
    case Difference::kUngrouped:
      spec.group.clear(), spec.group_size = spec.group_index = 0;
      break;
    case Difference::kMembersOfSet:
      break;
  }
  return spec;
}

Submission make_submission(const Spec& spec, int rank, int process_set,
                           const std::shared_ptr<Memory>& memory) {
  Submission submission;
  submission.kind = spec.kind;
  submission.process_set = process_set;
  submission.group = spec.group;
  submission.group_size = spec.group_size;
  submission.group_index = spec.group_index;
  if (!spec.unnamed) submission.name = spec.key;
  submission.keep_alive = memory;
  if (spec.kind == OpKind::kBarrier) return submission;
  submission.op = spec.op;
  submission.root = spec.root;
  submission.prescale = spec.prescale;
  submission.postscale = spec.postscale;
  const auto view = [dtype = spec.dtype, columns = spec.columns](std::vector<std::byte>& bytes,
                                                                 std::int64_t rows) {
    bytes.resize(static_cast<std::size_t>(rows * columns) * size_of(dtype));
    return TensorView{bytes.data(), rows * columns, dtype, {}, {rows, columns}};
  };
  const std::int64_t rows = rows_on(spec, rank);
  submission.input = view(memory->input, rows);
  with_type(spec.dtype, [&](auto zero) {
    using Element = decltype(zero);
    auto* const elements = reinterpret_cast<Element*>(memory->input.data());
    for (std::int64_t i = 0; i < submission.input.count; ++i)
      elements[i] = static_cast<Element>(value(spec, rank, i));
  });
  if (spec.kind == OpKind::kAllgather || spec.kind == OpKind::kAlltoall) {
    submission.allocate_output = [view, memory = memory.get()](const OutputSizes& sizes) {
      return view(memory->output, std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(),
                                                  std::int64_t{0}));
    };
    if (spec.kind == OpKind::kAlltoall) {
      for (const int to : spec.members) submission.splits.push_back(split(spec, rank, to));
    }
    return submission;
  }
  const auto members = static_cast<int>(spec.members.size());
  const bool scatters = spec.kind == OpKind::kReducescatter;
  submission.output = view(
      memory->output, scatters ? rows_of_member(rows, members, position_in(spec, rank)) : rows);
  return submission;
}

std::optional<std::string> check(const Spec& spec, int rank, const Memory& memory) {
  const std::vector<double> right = expected(spec, rank);
  const std::size_t count = memory.output.size() / size_of(spec.dtype);
  if (count != right.size())
    return spec.key + ": " + std::to_string(count) + " elements, expected " +
           std::to_string(right.size());
  std::optional<std::string> fault;
  with_type(spec.dtype, [&](auto zero) {
    using Element = decltype(zero);
    const auto* const elements = reinterpret_cast<const Element*>(memory.output.data());
    for (std::size_t i = 0; i < count && !fault; ++i) {
      const double got = static_cast<double>(elements[i]);
      const double tolerance = spec.op == ReduceOp::kAverage ? 1e-6 * std::abs(right[i]) : 0;
      if (std::abs(got - right[i]) <= tolerance) continue;
      fault = std::string(to_string(spec.kind)) + " '" + spec.key + "': element " +
              std::to_string(i) + " is " + std::to_string(got) + ", expected " +
              std::to_string(right[i]);
    }
  });
  return fault;
}

}  // namespace hvd::campaign
