#include "fault/campaign_operations.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace hvd::campaign {
namespace {

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

/// @pre the kind is chosen
void choose_numbers(Spec& spec, const Plan& plan, bool joins, Random& random) {
  Submission& form = spec.form;
  form.input.dtype = static_cast<DataType>(random.below(kDataTypeCount));
  testing::choose_form(spec, plan.ranks, joins, [&random] { return random.next(); });
  std::int64_t rows = some_rows(random);
  std::int64_t columns = 1;
  if (spec.parameters.kind == OpKind::kReducescatter) rows = random.below(14);
  if (spec.parameters.kind != OpKind::kAllreduce) columns = 1 + random.below(40);
  if (rows > 10'000) columns = 1 + random.below(2);
  form.input.shape = {rows, columns};
  const bool floating =
      form.input.dtype == DataType::kFloat32 || form.input.dtype == DataType::kFloat64;
  if (floating && spec.parameters.op == ReduceOp::kSum && random.chance(30))
    spec.parameters.prescale = 0.5, spec.parameters.postscale = 4;
}

Spec on_set(const Plan& plan, Set set) {
  Spec spec;
  spec.set = set;
  spec.form.input.shape = {1, 1};
  if (set == Set::kSubset) {
    spec.members = plan.subset;
  } else if (set == Set::kSurvivors) {
    spec.members = plan.survivors;
  } else {
    spec.members.resize(static_cast<std::size_t>(plan.ranks));
    std::iota(spec.members.begin(), spec.members.end(), 0);
  }
  spec.contributors = spec.members;
  return spec;
}

Spec random_operation(const Plan& plan, Random& random) {
  Spec spec = on_set(plan, random.chance(30) ? Set::kSubset : Set::kWorld);
  spec.parameters.kind = testing::choose_kind(/*joins=*/false, [&random] { return random.next(); });
  choose_numbers(spec, plan, /*joins=*/false, random);
  return spec;
}

void name(Spec& spec, const std::string& key, bool unnamed = false) {
  spec.key = key;
  spec.form.name = unnamed ? "" : key;
}

bool about_group(Difference difference) {
  return difference == Difference::kGroupName || difference == Difference::kGroupSize ||
         difference == Difference::kGroupIndex || difference == Difference::kUngrouped ||
         difference == Difference::kOneOfGroup;
}

/// Adds the operation that the victim may submit differently. Every step submits it, so that it is
/// cached before the fault and used again afterwards.
void add_disputed(const Plan& plan, std::vector<Spec>& operations) {
  Random random(plan.seed, 7);
  const bool in_subset = plan.victim_in_subset() && plan.subset.size() > 1 && random.chance(40);
  Spec spec = on_set(plan, in_subset ? Set::kSubset : Set::kWorld);
  name(spec, "disputed");
  Submission& form = spec.form;
  form.input.shape[0] = random.chance(50) ? 6 : 5'000;
  spec.parameters.kind = random.chance(70) ? OpKind::kAllreduce : OpKind::kReducescatter;
  spec.parameters.root = spec.members.front();
  if (plan.difference == Difference::kRoot) spec.parameters.kind = OpKind::kBroadcast;
  if (!about_group(plan.difference) || plan.fault != Fault::kDisagree)
    return operations.push_back(spec);
  spec.parameters.kind = OpKind::kAllreduce;
  form.group = "disputed";
  form.group_size = 2;
  for (int index = 0; index < 2; ++index) {
    name(spec, "disputed." + std::to_string(index));
    form.group_index = index;
    operations.push_back(spec);
  }
}

void add_group(const Plan& plan, Random& random, bool unnamed, std::vector<Spec>& operations) {
  Spec spec = on_set(plan, random.chance(30) ? Set::kSubset : Set::kWorld);
  spec.form.group = unnamed ? "" : "layer";
  spec.form.group_size = 2 + random.below(2);
  for (int index = 0; index < spec.form.group_size; ++index) {
    spec.form.group_index = index;
    name(spec, (unnamed ? "unnamed." : "layer.") + std::to_string(index), unnamed);
    spec.form.input.shape[0] = some_rows(random);
    operations.push_back(spec);
  }
}

void seed_data(std::vector<Spec>& operations, int epoch, int step) {
  for (std::size_t i = 0; i < operations.size(); ++i)
    operations[i].seed = static_cast<std::uint64_t>(epoch * 50 + step) * 100 + i;
}

}  // namespace

std::vector<Spec> operations_of_step(const Plan& plan, int epoch, int step) {
  std::vector<Spec> operations;
  Random fixed(plan.seed, 1);
  const int count = 3 + fixed.below(4);
  for (int i = 0; i < count; ++i) {
    operations.push_back(random_operation(plan, fixed));
    name(operations.back(), "fixed" + std::to_string(i), fixed.chance(25));
  }
  add_disputed(plan, operations);
  Random fresh(plan.seed, static_cast<std::uint64_t>(100 + epoch * 50 + step));
  if (fresh.chance(60)) {
    operations.push_back(random_operation(plan, fresh));
    name(operations.back(), fresh.chance(50) ? "fresh" : "fresh" + std::to_string(step));
  }
  if (fresh.chance(40)) add_group(plan, fresh, fresh.chance(40), operations);
  const bool transfer =
      plan.moment == Moment::kInTransfer && epoch == plan.epoch && step == plan.step;
  if (transfer || fresh.chance(10)) {
    Spec large = on_set(plan, Set::kWorld);
    name(large, "large");
    large.form.input.shape[0] = transfer ? 4'000'003 : 1'000'003;
    operations.push_back(large);
  }
  seed_data(operations, epoch, step);
  return operations;
}

std::vector<Spec> operations_of_extra_step(const Plan& plan, int epoch, int step, int extra) {
  std::vector<Spec> operations;
  Random random(plan.seed, static_cast<std::uint64_t>(1000 + epoch * 50 + extra));
  for (int i = 0; i < 3; ++i) {
    Spec spec = on_set(plan, Set::kWorld);
    spec.parameters.kind = i == 1 ? OpKind::kAllgather : OpKind::kAllreduce;
    choose_numbers(spec, plan, /*joins=*/true, random);
    name(spec, "extra" + std::to_string(extra) + '.' + std::to_string(i), i == 2);
    std::erase_if(spec.contributors,
                  [&](int rank) { return plan.extra[static_cast<std::size_t>(rank)] < extra; });
    operations.push_back(spec);
  }
  seed_data(operations, epoch, step);
  return operations;
}

Spec operation_without_victim(const Plan& plan) {
  Spec spec = on_set(plan, Set::kSurvivors);
  name(spec, "without");
  spec.form.input.shape[0] = 1000;
  return spec;
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
    if (operations[index].unnamed()) unnamed.push_back(index);
  }
  std::sort(unnamed.begin(), unnamed.end());
  auto next = unnamed.begin();
  for (std::size_t& index : order) {
    if (operations[index].unnamed()) index = *next++;
  }
  return order;
}

bool concerned(const Spec& spec, const Plan& plan) {
  if (!spec.key.starts_with("disputed")) return false;
  if (plan.fault == Fault::kWrongKind) return true;
  if (plan.fault != Fault::kDisagree || plan.difference == Difference::kMembersOfSet) return false;
  return plan.difference != Difference::kOneOfGroup || spec.form.group_index == 1;
}

Spec sabotaged(const Spec& right, const Plan& plan) {
  Spec spec = right;
  Submission& form = spec.form;
  if (plan.fault == Fault::kWrongKind) {
    constexpr std::array kOthers = {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAlltoall,
                                    OpKind::kBarrier};
    spec.parameters.kind = kOthers[static_cast<std::size_t>(plan.position) % kOthers.size()];
    Random random(plan.seed, 8);
    testing::choose_form(spec, plan.ranks, /*joins=*/false, [&random] { return random.next(); });
    return spec;
  }
  switch (plan.difference) {
    case Difference::kShape:
    case Difference::kOneOfGroup:
      ++form.input.shape[0];
      break;
    case Difference::kDtype:
      form.input.dtype = DataType::kFloat64;
      break;
    case Difference::kOp:
      spec.parameters.op = ReduceOp::kMax;
      break;
    case Difference::kRoot:
      spec.parameters.root = spec.members.back();
      break;
    case Difference::kScale:
      spec.parameters.postscale = 2;
      break;
    case Difference::kGroupName:
      form.group = "other";
      break;
    case Difference::kGroupSize:
      ++form.group_size;
      break;
    case Difference::kGroupIndex:
      form.group_index = 1 - form.group_index;
      break;
    case Difference::kUngrouped:
      form.group.clear(), form.group_size = form.group_index = 0;
      break;
    case Difference::kMembersOfSet:
      break;
  }
  return spec;
}

Submission make_submission(const Spec& spec, int rank, int process_set,
                           const std::shared_ptr<Memory>& memory) {
  Submission submission = spec.submission(/*use=*/0, rank, memory, /*in_place=*/false);
  submission.process_set = process_set;
  submission.keep_alive = memory;
  return submission;
}

std::string check(const Spec& spec, int rank, const Memory& memory) {
  const std::string fault = spec.fault(/*use=*/0, rank, spec.contributors, memory.output);
  if (fault.empty()) return fault;
  return std::string(to_string(spec.parameters.kind)) + " '" + spec.key + "': " + fault;
}

}  // namespace hvd::campaign
