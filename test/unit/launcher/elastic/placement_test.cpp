#include "elastic/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/text.h"

namespace hvd::launcher {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// Hosts whose workers fail as a test specifies.
class Cluster {
 public:
  Cluster(const std::vector<int>& slots, WorkerCounts counts) : placement(slots, counts, now) {
    for (const std::size_t host : placement.agents_due(now)) placement.host_connected(host);
  }
  /// The slots in which workers are started now.
  std::vector<int> start() {
    std::vector<int> slots;
    for (const Placement::Start& start : placement.workers_due(now)) {
      slots.push_back(start.slot);
      replaced.push_back(start.replaces);
    }
    return slots;
  }
  void fail(int slot) {
    placement.lost(slot, next_id++, now);
    placement.freed(slot);
  }
  /// The seconds until the next worker is started.
  double wait() {
    const TimePoint begin = now;
    for (;;) {
      if (!start().empty()) return std::chrono::duration<double>(now - begin).count();
      const auto next = placement.next_due(now);
      if (!next) return -1;
      now = *next;
    }
  }

  TimePoint now = seconds(1000);
  Placement placement;
  std::uint64_t next_id = 1;
  std::vector<std::uint64_t> replaced;
};

TEST(Placement, FillsTheHostsInOrderOnceAllAgentsHaveConnected) {
  TimePoint now = seconds(5);
  Placement placement({2, 2, 1}, {.start = 3, .min_np = 1, .max_np = 3}, now);
  EXPECT_THAT(placement.agents_due(now), ElementsAre(0, 1, 2));
  EXPECT_THAT(placement.agents_due(now), IsEmpty());
  placement.host_connected(1);
  placement.host_connected(2);
  EXPECT_THAT(placement.workers_due(now), IsEmpty());
  placement.host_connected(0);
  const auto starts = placement.workers_due(now);
  ASSERT_THAT(starts, SizeIs(3));
  EXPECT_EQ(starts[0].slot, 0);
  EXPECT_EQ(starts[1].slot, 1);
  EXPECT_EQ(starts[2].slot, 2);
  EXPECT_THAT(placement.workers_due(now), IsEmpty());
}

TEST(Placement, AHostOfAScriptThatIsOutOfReachDoesNotDelayTheStart) {
  const TimePoint now = seconds(5);
  Placement placement({1, 1, 1}, {.start = 2, .min_np = 1, .max_np = 3}, now, {}, true);
  placement.agents_due(now);
  placement.host_connected(1);
  EXPECT_THAT(placement.workers_due(now), IsEmpty()) << "there are too few slots";
  placement.host_connected(2);
  const auto starts = placement.workers_due(now);
  ASSERT_THAT(starts, SizeIs(2));
  EXPECT_EQ(starts[0].slot, 1);
  EXPECT_EQ(starts[1].slot, 2);
}

TEST(Placement, TheStartWaitsForOneAttemptToStartEachAgent) {
  const TimePoint now = seconds(5);
  for (const bool discovered : {false, true}) {
    Placement placement({1, 1}, {.start = 2, .min_np = 1, .max_np = 2}, now, {}, discovered);
    placement.agents_due(now);
    placement.host_connected(1);
    EXPECT_THAT(placement.workers_due(now), IsEmpty());
    placement.host_lost(0, now);
    EXPECT_THAT(placement.agents_due(now), ElementsAre(0)) << "again";
    EXPECT_THAT(placement.workers_due(now), SizeIs(1));
  }
}

TEST(Placement, StartsTheFirstSizeAndLaterTheLargest) {
  Cluster cluster({8}, {.start = 2, .min_np = 1, .max_np = 4, .spares = 1});
  EXPECT_THAT(cluster.start(), ElementsAre(0, 1, 2)) << "with the spare";
  cluster.placement.runs(0);
  EXPECT_THAT(cluster.start(), ElementsAre(3, 4));
  Cluster small({3}, {.start = 2, .min_np = 1, .max_np = 4, .spares = 1});
  EXPECT_THAT(small.start(), ElementsAre(0, 1, 2));
  small.placement.runs(0);
  EXPECT_THAT(small.start(), IsEmpty()) << "there are no more slots";
}

TEST(Placement, PausesDoubleWhileNoReplacementBecomesARank) {
  Cluster cluster({1}, {});
  EXPECT_THAT(cluster.start(), ElementsAre(0));
  cluster.placement.runs(0);
  for (const double pause : {0, 1, 2, 4, 8, 16, 32, 60, 60, 60}) {
    cluster.fail(0);
    EXPECT_EQ(cluster.wait(), pause);
  }
  cluster.placement.runs(0);
  cluster.fail(0);
  EXPECT_EQ(cluster.wait(), 0) << "it was a rank";
  EXPECT_EQ(cluster.placement.replaced(), 11);
  EXPECT_EQ(cluster.replaced.back(), 11) << "the worker that it replaces";
}

TEST(Placement, ASlotIsUsedAgainOnlyWhenItIsFree) {
  Cluster cluster({1}, {});
  cluster.start();
  cluster.placement.runs(0);
  cluster.placement.lost(0, 1, cluster.now);
  EXPECT_THAT(cluster.start(), IsEmpty());
  cluster.placement.freed(0);
  EXPECT_THAT(cluster.start(), ElementsAre(0));
}

TEST(Placement, AReplacementStaysOnItsHostIfThatHasASlot) {
  Cluster cluster({2, 2}, {.start = 2, .min_np = 1, .max_np = 2});
  EXPECT_THAT(cluster.start(), ElementsAre(0, 1));
  cluster.placement.runs(0);
  cluster.placement.lost(1, 1, cluster.now);
  EXPECT_THAT(cluster.start(), ElementsAre(2)) << "slot 1 is not free yet";
  cluster.placement.freed(1);
  cluster.placement.runs(2);
  cluster.fail(2);
  EXPECT_THAT(cluster.start(), ElementsAre(2));
}

TEST(Placement, AHostIsLeftOutAfterThreeFailuresInAMinuteForTwiceAsLongEachTime) {
  Cluster cluster({1, 1}, {.start = 1, .min_np = 1, .max_np = 1});
  EXPECT_THAT(cluster.start(), ElementsAre(0));
  for (const double cooldown : {10, 20, 40}) {
    for (int failure = 0; failure < 3; ++failure) {
      cluster.placement.runs(0);
      cluster.fail(0);
      if (failure < 2) EXPECT_THAT(cluster.start(), ElementsAre(0));
    }
    const auto left_out = cluster.placement.take_left_out();
    ASSERT_THAT(left_out, SizeIs(1));
    EXPECT_EQ(left_out[0].host, 0U);
    EXPECT_EQ(std::chrono::duration<double>(left_out[0].cooldown).count(), cooldown);
    EXPECT_THAT(cluster.start(), ElementsAre(1));
    cluster.now += seconds(static_cast<int>(cooldown));
    cluster.placement.runs(1);
    cluster.placement.lost(1, 99, cluster.now);  // its slot is not free, so the first host is used
    EXPECT_THAT(cluster.start(), ElementsAre(0)) << "after the cooldown";
    cluster.placement.freed(1);
    cluster.now += seconds(61);
  }
}

TEST(Placement, FailuresOverMoreThanAMinuteLeaveNoHostOut) {
  Cluster cluster({1, 1}, {.start = 1, .min_np = 1, .max_np = 1});
  cluster.start();
  for (int failure = 0; failure < 20; ++failure) {
    cluster.placement.runs(0);
    cluster.fail(0);
    EXPECT_THAT(cluster.start(), ElementsAre(0));
    cluster.now += seconds(31);
  }
  EXPECT_THAT(cluster.placement.take_left_out(), IsEmpty());
}

TEST(Placement, NoHostIsLeftOutWithoutWhichTheOthersAreTooFew) {
  for (const auto& slots : {std::vector<int>{4}, std::vector<int>{2, 2}}) {
    Cluster cluster(slots, {.start = 4, .min_np = 3, .max_np = 4});
    cluster.start();
    for (int failure = 0; failure < 30; ++failure) {
      cluster.placement.runs(0);
      cluster.fail(0);
      EXPECT_THAT(cluster.start(), ElementsAre(0));
    }
    EXPECT_THAT(cluster.placement.take_left_out(), IsEmpty());
  }
}

TEST(Placement, ALostHostIsReplacedByOthersAndItsAgentStartedAgain) {
  Cluster cluster({2, 2}, {.start = 2, .min_np = 1, .max_np = 2});
  EXPECT_THAT(cluster.start(), ElementsAre(0, 1));
  cluster.placement.runs(0);
  cluster.placement.runs(1);
  cluster.placement.lost(0, 1, cluster.now);
  cluster.placement.lost(1, 2, cluster.now);
  cluster.placement.host_lost(0, cluster.now);
  EXPECT_THAT(cluster.start(), ElementsAre(2, 3));
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), ElementsAre(0)) << "at once";
  cluster.placement.host_lost(0, cluster.now);
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), IsEmpty());
  EXPECT_EQ(cluster.placement.next_due(cluster.now), cluster.now + seconds(1));
  EXPECT_EQ(cluster.placement.reachable_slots(), 2);
}

TEST(Placement, ARefusedHostGetsNoMoreWorkers) {
  Cluster cluster({1, 1}, {.start = 1, .min_np = 1, .max_np = 1});
  cluster.start();
  cluster.placement.refuse_host(0);
  cluster.fail(0);
  EXPECT_THAT(cluster.start(), ElementsAre(1));
}

TEST(Placement, IsExhaustedWhenTooFewAreLeftAndNoMoreAreReplaced) {
  Cluster cluster({3}, {.start = 3, .min_np = 2, .max_np = 3, .spares = 0, .replacements = 1});
  EXPECT_FALSE(cluster.placement.exhausted());
  cluster.start();
  for (int slot = 0; slot < 3; ++slot) cluster.placement.runs(slot);
  cluster.fail(0);
  EXPECT_FALSE(cluster.placement.exhausted());
  EXPECT_THAT(cluster.start(), ElementsAre(0));
  cluster.fail(1);
  EXPECT_FALSE(cluster.placement.exhausted()) << "two are left";
  EXPECT_THAT(cluster.start(), IsEmpty());
  cluster.fail(2);
  EXPECT_TRUE(cluster.placement.exhausted());
}

TEST(Placement, CountsFailuresBeforeTheFirstGeneration) {
  Cluster cluster({2}, {.start = 2, .min_np = 1, .max_np = 2});
  cluster.start();
  cluster.fail(0);
  cluster.fail(1);
  EXPECT_EQ(cluster.placement.failed_starts(), 1) << "not in a row";
  cluster.start();
  cluster.fail(0);
  EXPECT_EQ(cluster.placement.failed_starts(), 2);
  cluster.placement.runs(1);
  cluster.wait();
  cluster.fail(0);
  EXPECT_EQ(cluster.placement.failed_starts(), 2) << "a generation has run";
}

TEST(Placement, HostsAreAddedAndHaveOtherNumbersOfSlots) {
  Cluster cluster({1}, {.start = 1, .min_np = 1, .max_np = 4});
  EXPECT_THAT(cluster.start(), ElementsAre(0));
  cluster.placement.runs(0);
  EXPECT_THAT(cluster.start(), IsEmpty());
  EXPECT_EQ(cluster.placement.add_host(0, cluster.now), 1U);
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), IsEmpty()) << "it has no slots";
  EXPECT_EQ(cluster.placement.resize_host(1, 2), 2);
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), ElementsAre(1));
  cluster.placement.host_connected(1);
  EXPECT_THAT(cluster.start(), ElementsAre(1, 2));
  EXPECT_EQ(cluster.placement.resize_host(0, 3), 2);
  EXPECT_THAT(cluster.start(), ElementsAre(3)) << "four ranks at most";
  EXPECT_EQ(cluster.placement.resize_host(0, 2), 0);
  EXPECT_TRUE(cluster.placement.has_place(3));
  EXPECT_FALSE(cluster.placement.has_place(4));
}

TEST(Placement, WorkersWithoutAPlaceAreReplacedWhileTheyLeave) {
  Cluster cluster({2, 2}, {.start = 2, .min_np = 2, .max_np = 2});
  EXPECT_THAT(cluster.start(), ElementsAre(0, 1));
  cluster.placement.runs(0);
  cluster.placement.resize_host(0, 0);
  EXPECT_FALSE(cluster.placement.has_place_on(0));
  EXPECT_THAT(cluster.start(), ElementsAre(2, 3));
  cluster.placement.left(0);
  cluster.placement.left(1);
  EXPECT_THAT(cluster.start(), IsEmpty());
  EXPECT_EQ(cluster.placement.replaced(), 0) << "nothing has failed";
  cluster.placement.host_lost(0, cluster.now);
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), IsEmpty());
  EXPECT_EQ(cluster.placement.resize_host(0, 2), 0) << "it has its slots again";
  EXPECT_THAT(cluster.placement.agents_due(cluster.now), ElementsAre(0));
}

TEST(Placement, AHostThatReturnsIsNotRefusedAnyMore) {
  Cluster cluster({1}, {.start = 1, .min_np = 1, .max_np = 1});
  cluster.placement.refuse_host(0);
  EXPECT_THAT(cluster.start(), IsEmpty());
  cluster.placement.forget_failures(0, cluster.now);
  EXPECT_THAT(cluster.start(), ElementsAre(0));
}

TEST(Placement, TheCooldownHasARange) {
  Placement placement({1, 1}, {}, seconds(100), {.first = seconds(3), .longest = seconds(5)});
  for (const std::size_t host : placement.agents_due(seconds(100))) placement.host_connected(host);
  TimePoint now = seconds(100);
  for (const int cooldown : {3, 5, 5}) {
    for (int failure = 0; failure < 3; ++failure) placement.lost(0, 1, now);
    const auto left_out = placement.take_left_out();
    ASSERT_THAT(left_out, SizeIs(1));
    EXPECT_EQ(left_out[0].cooldown, seconds(cooldown));
    now += seconds(100);
  }
}

}  // namespace
}  // namespace hvd::launcher
