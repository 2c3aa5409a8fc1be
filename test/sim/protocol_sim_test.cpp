#include "sim/protocol_sim.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <set>

#include "support/seeds.h"
#include "support/watchdog.h"

namespace hvd::sim {
namespace {

std::uint64_t seeds() { return testing::seeds(/*part=*/120, /*full=*/200); }

// Whether two requests agree. Implemented independently of the validator that is tested.
bool agree(wire::Request a, wire::Request b) {
  if (a.kind == OpKind::kAllgather && b.kind == OpKind::kAllgather && !a.shape.empty() &&
      !b.shape.empty()) {
    a.shape[0] = b.shape[0] = 0;
  }
  return a == b;
}

bool all_agree(const std::map<int, Record>& use) {
  for (const auto& [rank, record] : use) {
    if (!agree(record.request, use.begin()->second.request)) return false;
  }
  return true;
}

struct Totals {
  std::uint64_t uses = 0;
  std::map<StatusCode, std::uint64_t> ended = {};
  std::uint64_t plans = 0, messages = 0, by_bit = 0, tombstones = 0, warnings = 0,
                stale_reports = 0, fused = 0;
  std::uint64_t displaced = 0, seeds_with_groups_split = 0, merged = 0, overdue = 0;
};

/// Judges one use of one operation by how it ended on every rank that submitted it.
class UseJudge {
 public:
  UseJudge(const Scenario& scenario, const Outcome& outcome)
      : scenario_(scenario), outcome_(outcome) {}

  void judge(const std::string& name, std::size_t number) const {
    const auto& use = outcome_.uses.at(name)[number];
    if (use.empty()) return;
    SCOPED_TRACE("'" + name + "', use " + std::to_string(number));
    const Record& first = use.begin()->second;
    for (const auto& [rank, record] : use) {
      EXPECT_EQ(record.endings, 1) << "on rank " << rank;
      EXPECT_EQ(record.code, first.code)
          << "on rank " << rank << ": " << record.message << "\nothers: " << first.message;
      EXPECT_EQ(record.message, first.message) << "on rank " << rank;
    }
    const bool complete = use.size() == static_cast<std::size_t>(scenario_.ranks);
    if (first.code == StatusCode::kOk) {
      EXPECT_TRUE(complete) << "ran although some rank had not submitted it";
      EXPECT_TRUE(all_agree(use)) << "ran although ranks disagree";
    } else {
      EXPECT_NE(first.message.find(std::string(to_string(first.request.kind)) + " '" + name + "'"),
                std::string::npos)
          << first.message;
    }
    judge_class(number, use, first);
  }

 private:
  void judge_class(std::size_t number, const std::map<int, Record>& use,
                   const Record& first) const {
    // Without absent ranks the error class is determined; otherwise it also depends on which rank
    // was faster.
    if (!scenario_.anyone_waits_in_vain()) {
      const bool fine = all_agree(use) && group_agrees(first.request, number);
      EXPECT_EQ(first.code, fine ? StatusCode::kOk : StatusCode::kMismatch) << first.message;
      return;
    }
    std::set<StatusCode> possible{StatusCode::kOk, StatusCode::kMismatch, StatusCode::kStalled};
    if (!scenario_.leaves_after.empty()) possible.insert(StatusCode::kShutdown);
    // The last uses of an operation that some rank still owes wait until the others have left.
    if (owed_by_someone(use)) possible.insert(StatusCode::kShutdown);
    EXPECT_TRUE(possible.contains(first.code))
        << static_cast<int>(first.code) << ": " << first.message;
    if (first.code == StatusCode::kMismatch && first.request.group_size == 0) {
      EXPECT_EQ(use.size(), static_cast<std::size_t>(scenario_.ranks));
      EXPECT_FALSE(all_agree(use)) << first.message;
    }
  }

  bool owed_by_someone(const std::map<int, Record>& use) const {
    return use.size() < static_cast<std::size_t>(scenario_.ranks);
  }

  // All members of a named group are used equally often when no rank is absent; an unnamed group's
  // members follow one another.
  bool group_agrees(const wire::Request& request, std::size_t number) const {
    for (int i = 0; i < request.group_size; ++i) {
      const std::string member =
          request.unnamed
              ? wire::unnamed_name(request, request.ordinal + static_cast<std::uint64_t>(i) -
                                                static_cast<std::uint64_t>(request.group_index))
              : request.group + "." + std::to_string(i);
      const auto& uses = outcome_.uses.at(member);
      if (uses.size() > number && !all_agree(uses[number])) return false;
    }
    return true;
  }

  const Scenario& scenario_;
  const Outcome& outcome_;
};

void judge(const Scenario& scenario, const Outcome& outcome, Totals& totals) {
  for (const auto& complaint : outcome.complaints) ADD_FAILURE() << complaint;
  EXPECT_TRUE(outcome.ended);
  const UseJudge judge_use(scenario, outcome);
  for (const auto& [name, uses] : outcome.uses) {
    for (std::size_t i = 0; i < uses.size(); ++i) {
      judge_use.judge(name, i);
      if (uses[i].empty()) continue;
      ++totals.uses;
      ++totals.ended[uses[i].begin()->second.code];
    }
  }
  // A rank that is behind delays the others, so the number of displaced responses is bounded by its
  // own submissions.
  EXPECT_LE(outcome.max_displaced, 2 * scenario.max_operations_per_step());
  totals.plans += outcome.plans;
  totals.messages += outcome.messages;
  totals.by_bit += outcome.by_bit;
  totals.tombstones += outcome.tombstones;
  totals.warnings += outcome.warnings;
  totals.stale_reports += outcome.stale_reports;
  totals.fused += outcome.fused;
  totals.displaced += outcome.max_displaced;
  totals.merged += outcome.merged;
  totals.overdue += outcome.overdue;
}

// @param radix fan-out of the tree through which reports and plans are sent; 0: no tree
Totals simulate(int radix, Duration longest_hold = kStallWarning / 8) {
  Totals totals;
  std::uint64_t current = 0;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t seed = 0; seed < seeds() && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    current = seed;
    Scenario scenario = make_scenario(seed);
    scenario.tree_radix = radix;
    scenario.longest_hold = longest_hold;
    judge(scenario, ProtocolSim(scenario).run(), totals);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf(
      "%llu seeds in %.1f s: %llu uses (%llu ok, %llu mismatch, %llu stalled, %llu shutdown), %llu "
      "plans, %llu messages, "
      "%llu cache hits, %llu tombstones, %llu warnings, %llu overtaken reports, %llu fused "
      "batches, %llu displaced\n",
      static_cast<unsigned long long>(current + 1), seconds,
      static_cast<unsigned long long>(totals.uses),
      static_cast<unsigned long long>(totals.ended[StatusCode::kOk]),
      static_cast<unsigned long long>(totals.ended[StatusCode::kMismatch]),
      static_cast<unsigned long long>(totals.ended[StatusCode::kStalled]),
      static_cast<unsigned long long>(totals.ended[StatusCode::kShutdown]),
      static_cast<unsigned long long>(totals.plans),
      static_cast<unsigned long long>(totals.messages),
      static_cast<unsigned long long>(totals.by_bit),
      static_cast<unsigned long long>(totals.tombstones),
      static_cast<unsigned long long>(totals.warnings),
      static_cast<unsigned long long>(totals.stale_reports),
      static_cast<unsigned long long>(totals.fused),
      static_cast<unsigned long long>(totals.displaced));
  if (seeds() < 100) return totals;
  // The scenarios cover all cases.
  for (const auto code :
       {StatusCode::kOk, StatusCode::kMismatch, StatusCode::kStalled, StatusCode::kShutdown}) {
    EXPECT_GT(totals.ended[code], 20u) << static_cast<int>(code);
  }
  for (const auto count : {totals.by_bit, totals.tombstones, totals.warnings, totals.stale_reports,
                           totals.fused, totals.displaced}) {
    EXPECT_GT(count, 20u);
  }
  return totals;
}

TEST(ProtocolSim, EveryRankAppliesTheSamePlansAndEveryUseEndsOnceWithTheRightClass) {
  const Totals totals = simulate(0);
  EXPECT_EQ(totals.merged, 0u);
}

TEST(ProtocolSim, OverADeepTreeToo) {
  const Totals totals = simulate(2);
  if (seeds() < 100) return;
  EXPECT_GT(totals.merged, 20u);
  EXPECT_GT(totals.overdue, 20u);
}

// Operations that all ranks have submitted continue without any timer. So without late ranks no
// operation stalls, however long the tree may hold reports back.
TEST(ProtocolSim, OverADeepTreeThatHoldsBackWithoutLimit) {
  const Totals totals = simulate(2, 10 * kStallShutdown);
  EXPECT_EQ(totals.overdue, 0u);
}

TEST(ProtocolSim, OverATreeOfFourToo) {
  const Totals totals = simulate(4);
  if (seeds() < 100) return;
  EXPECT_GT(totals.merged, 20u);
}

}  // namespace
}  // namespace hvd::sim
