#include "sim/scenario.h"

#include <algorithm>
#include <array>

namespace hvd::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

template <class Values>
auto pick_one(std::mt19937_64& random, const Values& values) {
  return values[static_cast<std::size_t>(
      pick(random, 0, static_cast<std::int64_t>(std::size(values)) - 1))];
}

std::vector<std::int64_t> pick_shape(std::mt19937_64& random) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(pick(random, 1, 3)));
  for (auto& size : shape) size = pick(random, 0, 9) == 0 ? 0 : pick(random, 1, 40);
  return shape;
}

/// The operations that exist in a scenario. A step uses some of them.
class Catalogue {
 public:
  Catalogue(Scenario& scenario, std::mt19937_64& random) : scenario_(scenario), random_(random) {
    const auto singles = pick(random_, 2, 14);
    for (std::int64_t i = 0; i < singles; ++i)
      units_.push_back({pick_request("op" + std::to_string(i))});
    const auto groups = pick(random_, 0, 2);
    for (std::int64_t g = 0; g < groups; ++g) add_group("group" + std::to_string(g));
    const auto unnamed = pick(random_, 0, 4);
    for (std::int64_t u = 0; u < unnamed; ++u) add_unnamed();
  }

  Step pick_step() {
    Step step;
    for (const auto& requests : units_) {
      if (chance(random_, 15)) continue;
      Unit unit;
      for (const auto& request : requests) unit.push_back(make_use(request));
      step.push_back(std::move(unit));
    }
    return step;
  }

 private:
  wire::Request pick_request(const std::string& name) {
    wire::Request request;
    request.name = name;
    request.kind =
        pick_one(random_, std::array{OpKind::kAllreduce, OpKind::kAllreduce, OpKind::kAllgather,
                                     OpKind::kBroadcast, OpKind::kBarrier});
    request.dtype =
        pick_one(random_, std::array{DataType::kFloat32, DataType::kFloat32, DataType::kInt64});
    request.shape =
        request.kind == OpKind::kBarrier ? std::vector<std::int64_t>{0} : pick_shape(random_);
    request.op = ReduceOp::kSum;
    if (request.kind == OpKind::kAllreduce && chance(random_, 30)) request.op = ReduceOp::kMax;
    if (request.kind == OpKind::kAllreduce && chance(random_, 20)) request.prescale = 0.5;
    if (request.kind == OpKind::kBroadcast)
      request.root = static_cast<int>(pick(random_, 0, scenario_.ranks - 1));
    return request;
  }

  void add_group(const std::string& name) {
    const auto size = static_cast<int>(pick(random_, 2, 5));
    std::vector<wire::Request> members;
    for (int i = 0; i < size; ++i) {
      wire::Request member = pick_request(name + "." + std::to_string(i));
      member.group = name;
      member.group_size = size;
      member.group_index = i;
      members.push_back(std::move(member));
    }
    units_.push_back(std::move(members));
  }

  void add_unnamed() {
    wire::Request request = pick_request("");
    if (request.kind == OpKind::kBarrier) request.kind = OpKind::kAllreduce;
    request.unnamed = true;
    request.in_sequence = chance(random_, 50);
    const auto size = chance(random_, 30) ? static_cast<int>(pick(random_, 2, 3)) : 0;
    std::vector<wire::Request> members;
    for (int i = 0; i < std::max(size, 1); ++i) {
      request.group_size = size;
      request.group_index = i;
      members.push_back(request);
    }
    units_.push_back(std::move(members));
  }

  Use make_use(const wire::Request& request) {
    Use use;
    use.request = request;
    if (request.kind != OpKind::kAllgather) return use;
    use.first_dims.resize(static_cast<std::size_t>(scenario_.ranks), request.shape[0]);
    if (chance(random_, 40)) {
      for (auto& dim : use.first_dims) dim = pick(random_, 0, 20);
    }
    return use;
  }

  Scenario& scenario_;
  std::mt19937_64& random_;
  std::vector<std::vector<wire::Request>> units_;
};

wire::Request deviate(std::mt19937_64& random, wire::Request request) {
  if (request.in_sequence && request.group_size == 0 && chance(random, 50)) {
    request.kind = request.kind == OpKind::kBroadcast ? OpKind::kAllreduce : OpKind::kBroadcast;
    return request;
  }
  switch (pick(random, 0, 3)) {
    case 0:
      request.shape.push_back(3);
      break;
    case 1:
      request.dtype = DataType::kUInt8;
      break;
    case 2:
      request.device = DeviceType::kCuda;
      break;
    default:
      request.postscale = 2.0;
      break;
  }
  return request;
}

void add_mismatches(Scenario& scenario, std::mt19937_64& random) {
  for (Step& step : scenario.steps) {
    for (Unit& unit : step) {
      for (Use& use : unit) {
        if (!chance(random, 6)) continue;
        const auto count = pick(random, 1, std::max(1, scenario.ranks / 3));
        for (std::int64_t i = 0; i < count; ++i) {
          const auto rank = static_cast<int>(pick(random, 0, scenario.ranks - 1));
          use.deviating[rank] = deviate(random, use.request);
        }
      }
    }
  }
}

// Unnamed operations are matched by position, so a program that skips one is a different program.
// Only named operations are skipped.
void add_absences(Scenario& scenario, std::mt19937_64& random) {
  const auto count = pick(random, 1, 4);
  for (std::int64_t i = 0; i < count; ++i) {
    Step& step = scenario.steps[static_cast<std::size_t>(
        pick(random, 0, static_cast<std::int64_t>(scenario.steps.size()) - 1))];
    std::vector<Unit*> named;
    for (Unit& unit : step) {
      if (!unit.front().request.unnamed) named.push_back(&unit);
    }
    if (named.empty()) continue;
    Unit& unit = *named[static_cast<std::size_t>(
        pick(random, 0, static_cast<std::int64_t>(named.size()) - 1))];
    const auto rank = static_cast<int>(pick(random, 0, scenario.ranks - 1));
    const bool skips = chance(random, 50);
    const Duration lateness = kStallShutdown * pick(random, 5, 15) / 10;
    for (Use& use : unit) {
      if (skips) {
        use.skipped_by.insert(rank);
      } else {
        use.late[rank] = lateness;
      }
    }
  }
}

}  // namespace

std::int64_t pick(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

Duration pick_up_to(std::mt19937_64& random, Duration longest) {
  return Duration(pick(random, 0, longest.count()));
}

bool chance(std::mt19937_64& random, int percent) { return pick(random, 0, 99) < percent; }

wire::Request Use::asked_by(int rank) const {
  const auto found = deviating.find(rank);
  wire::Request asked = found != deviating.end() ? found->second : request;
  if (!first_dims.empty()) asked.shape[0] = first_dims[static_cast<std::size_t>(rank)];
  return asked;
}

bool Scenario::anyone_waits_in_vain() const {
  if (!leaves_after.empty()) return true;
  for (const Step& step : steps) {
    for (const Unit& unit : step) {
      for (const Use& use : unit) {
        if (!use.skipped_by.empty() || !use.late.empty()) return true;
      }
    }
  }
  return false;
}

std::size_t Scenario::max_operations_per_step() const {
  std::size_t most = 0;
  for (const Step& step : steps) {
    std::size_t operations = 0;
    for (const Unit& unit : step) operations += unit.size();
    most = std::max(most, operations);
  }
  return most;
}

Scenario make_scenario(std::uint64_t seed) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15u + 1);
  Scenario scenario;
  scenario.seed = seed;
  scenario.ranks = pick_one(random, std::array{2, 2, 3, 4, 5, 7, 8, 16, 33, 64});
  scenario.cache_capacity = pick_one(random, std::array<std::size_t, 6>{0, 1, 3, 8, 1024, 1024});
  scenario.fusion_threshold = pick_one(random, std::array<std::int64_t, 4>{0, 300, 5000, 64 << 20});
  scenario.longest_delay = pick_one(
      random, std::array<Duration, 3>{microseconds(2), microseconds(200), milliseconds(20)});
  scenario.longest_think =
      pick_one(random, std::array<Duration, 3>{Duration(0), microseconds(100), milliseconds(5)});
  scenario.longest_execution =
      pick_one(random, std::array<Duration, 3>{Duration(0), microseconds(300), milliseconds(10)});
  scenario.split_groups = chance(random, 25);
  Catalogue catalogue(scenario, random);
  const auto steps = pick(random, 3, 8);
  for (std::int64_t i = 0; i < steps; ++i) scenario.steps.push_back(catalogue.pick_step());
  if (chance(random, 60)) add_mismatches(scenario, random);
  if (chance(random, 35)) add_absences(scenario, random);
  if (chance(random, 20)) {
    const auto leavers = pick(random, 1, std::max(1, scenario.ranks / 4));
    for (std::int64_t i = 0; i < leavers; ++i) {
      scenario.leaves_after[static_cast<int>(pick(random, 0, scenario.ranks - 1))] =
          static_cast<std::size_t>(pick(random, 1, steps - 1));
    }
  }
  return scenario;
}

}  // namespace hvd::sim
