#include "fault/campaign_plan.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace hvd::campaign {
namespace {

// In the order of the seeds, so that a few successive seeds cover most faults.
constexpr std::array kFaults = {
    Fault::kKill, Fault::kStop,  Fault::kDisagree,  Fault::kLeave,     Fault::kShortDelay,
    Fault::kKill, Fault::kThrow, Fault::kLongDelay, Fault::kWrongKind, Fault::kKill,
    Fault::kExit, Fault::kPause, Fault::kStop,      Fault::kDisagree,  Fault::kKill};

constexpr std::array kFaultNames = {"none",       "kill",        "throw",      "stop",
                                    "pause",      "short delay", "long delay", "disagree",
                                    "wrong kind", "exit",        "leave"};
constexpr std::array kMomentNames = {"before the step", "among the submissions",
                                     "before the wait", "in a large transfer",
                                     "in a callback",   "any time",
                                     "in the barrier",  "in join",
                                     "in init"};
constexpr std::array kDifferenceNames = {
    "shape",      "dtype",       "op",        "root",           "scale",           "group name",
    "group size", "group index", "ungrouped", "one of a group", "members of a set"};

bool is_signal(Fault fault) {
  return fault == Fault::kKill || fault == Fault::kStop || fault == Fault::kPause;
}

std::vector<Moment> moments_of(Fault fault) {
  std::vector<Moment> moments = {Moment::kBeforeStep, Moment::kAmongSubmits, Moment::kInBarrier,
                                 Moment::kInJoin};
  if (fault == Fault::kDisagree || fault == Fault::kWrongKind) return {Moment::kBeforeStep};
  if (fault == Fault::kLongDelay) return moments;
  moments.push_back(Moment::kBeforeWait);
  if (fault == Fault::kLeave) return moments;
  moments.push_back(Moment::kInInit);
  if (is_signal(fault))
    moments.insert(moments.end(),
                   {Moment::kInTransfer, Moment::kInCallback, Moment::kAnyTime, Moment::kAnyTime});
  return moments;
}

double delay_of(const Plan& plan, Random& random) {
  if (plan.fault == Fault::kShortDelay) return 0.3 + 0.001 * random.below(1000);
  if (plan.fault == Fault::kLongDelay) return kLongDelaySeconds;
  if (plan.moment == Moment::kAnyTime) return 0.001 * random.below(500);
  return 0.00001 * random.below(1500);
}

std::vector<int> make_subset(int ranks, Random& random) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  for (int i = ranks - 1; i > 0; --i)
    std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(random.below(i + 1))]);
  all.resize(
      static_cast<std::size_t>(ranks == 2 ? 1 + random.below(2) : 2 + random.below(ranks - 2)));
  std::sort(all.begin(), all.end());
  return all;
}

void plan_joins(Plan& plan, Random& random) {
  plan.joins = plan.moment == Moment::kInJoin || random.chance(40);
  for (int rank = 0; rank < plan.ranks; ++rank) plan.extra.push_back(random.below(3));
  // The victim joins last. Otherwise some ranks would wait for it in a step, and others in join().
  if (plan.fault == Fault::kLongDelay && plan.moment == Moment::kInJoin)
    plan.extra[static_cast<std::size_t>(plan.victim)] = 3;
}

}  // namespace

bool Plan::victim_in_subset() const {
  return std::find(subset.begin(), subset.end(), victim) != subset.end();
}

bool Plan::by_timer() const {
  const bool anywhere = moment == Moment::kInTransfer || moment == Moment::kAnyTime ||
                        moment == Moment::kInBarrier || moment == Moment::kInJoin ||
                        moment == Moment::kInInit;
  return anywhere && is_signal(fault);
}

Plan make_plan(std::uint64_t seed) {
  Random random(seed, 0);
  Plan plan;
  plan.seed = seed;
  plan.fault = kFaults[seed % kFaults.size()];
  plan.ranks = 2 + static_cast<int>((seed + seed / kFaults.size()) % 3);
  if (random.chance(30))
    plan.hosts = plan.ranks == 4 ? "a,a,b,b" : plan.ranks == 3 ? "a,b,b" : "a,b";
  plan.victim = random.below(plan.ranks);
  const auto moments = moments_of(plan.fault);
  plan.moment = moments[static_cast<std::size_t>(random.below(static_cast<int>(moments.size())))];
  plan.difference = static_cast<Difference>((seed / kFaults.size() * 2 + seed % 2) % kDifferences);
  plan.epoch = plan.moment == Moment::kInInit ? 1 : random.below(kEpochs);
  plan.step = 1 + random.below(kSteps - 3);
  plan.position = random.below(8);
  plan.delay = delay_of(plan, random);
  plan.subset = make_subset(plan.ranks, random);
  for (int rank = 0; rank < plan.ranks; ++rank) {
    if (rank != plan.victim) plan.survivors.push_back(rank);
  }
  plan_joins(plan, random);
  return plan;
}

const char* to_string(Fault fault) { return kFaultNames[static_cast<std::size_t>(fault)]; }

std::string describe(const Plan& plan) {
  std::ostringstream out;
  out << "seed " << plan.seed << ": " << plan.ranks << " ranks"
      << (plan.hosts.empty() ? "" : " on hosts " + plan.hosts) << ", rank " << plan.victim << ": "
      << to_string(plan.fault);
  if (plan.fault == Fault::kDisagree) {
    out << " (" << kDifferenceNames[static_cast<std::size_t>(plan.difference)] << ')';
  } else if (plan.fault != Fault::kWrongKind) {
    out << ' ' << kMomentNames[static_cast<std::size_t>(plan.moment)];
  }
  out << ", epoch " << plan.epoch << " step " << plan.step << " position " << plan.position
      << " delay " << plan.delay << " s, set [";
  for (const int rank : plan.subset) out << (rank == plan.subset.front() ? "" : ",") << rank;
  out << ']' << (plan.joins ? ", joins" : "");
  return out.str();
}

}  // namespace hvd::campaign
