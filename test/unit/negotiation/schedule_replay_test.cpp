#include "negotiation/schedule_replay.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>

namespace hvd::control {
namespace {

using Outcome = ScheduleReplay::Outcome;

wire::Request request(const std::string& name, std::int64_t elements = 4) {
  wire::Request asked;
  asked.name = name;
  asked.shape = {elements};
  return asked;
}

AgreedBatch batch(std::initializer_list<const char*> names) {
  AgreedBatch agreed;
  for (const char* const name : names) agreed.operations.push_back({request(name)});
  return agreed;
}

/// Ranks that receive each other's flags.
class Ranks {
 public:
  explicit Ranks(int size) : flags_(static_cast<std::size_t>(size)) {
    std::vector<ArrivalFlags*> pointers;
    for (ArrivalFlags& flags : flags_) pointers.push_back(&flags);
    for (int rank = 0; rank < size; ++rank)
      replays_.push_back(std::make_unique<ScheduleReplay>(pointers, rank));
  }
  ScheduleReplay& operator[](std::size_t rank) { return *replays_[rank]; }
  /// Starts a replay that has a position for each batch.
  void enter(const std::vector<AgreedBatch>& schedule) {
    std::vector<AgreedBundle> bundles;
    for (const AgreedBatch& batch : schedule) bundles.push_back({batch});
    enter_bundles(bundles);
  }
  void enter_bundles(const std::vector<AgreedBundle>& schedule) {
    for (auto& replay : replays_) replay->enter(schedule);
  }

 private:
  std::vector<ArrivalFlags> flags_;
  std::vector<std::unique_ptr<ScheduleReplay>> replays_;
};

bool offer(ScheduleReplay& replay, const wire::Request& request) {
  SchedulePlace place;
  return replay.offer(request, place);
}

/// The first operation of the batch that it now runs, if any.
std::string ran(const ScheduleReplay& replay, const ScheduleReplay::NextBundle& advance) {
  return advance.outcome == Outcome::kRun
             ? replay.batch(advance.batch).operations.front().request.name
             : "";
}
std::string runs(ScheduleReplay& replay) {
  const ScheduleReplay::NextBundle next = replay.advance();
  return ran(replay, next);
}

TEST(ScheduleReplay, AnUnnamedOperationIsKnownByItsParameters) {
  const auto unnamed = [](std::uint64_t ordinal, std::int64_t elements) {
    wire::Request asked = request(wire::unnamed_name(OpKind::kAllreduce, ordinal), elements);
    asked.unnamed = true;
    asked.ordinal = ordinal;
    return asked;
  };
  Ranks ranks(1);
  AgreedBatch four, five;
  four.operations.push_back({unnamed(0, 4)});
  five.operations.push_back({unnamed(0, 5)});
  ranks.enter({batch({"a"}), four, five});
  for (std::uint64_t step = 1; step < 4; ++step) {
    EXPECT_TRUE(offer(ranks[0], unnamed(2 * step, 4)));
    EXPECT_TRUE(offer(ranks[0], unnamed(2 * step + 1, 5)));
    EXPECT_TRUE(offer(ranks[0], request("a")));
    for (int run = 0; run < 3; ++run) EXPECT_EQ(ranks[0].advance().outcome, Outcome::kRun);
  }
  EXPECT_FALSE(offer(ranks[0], unnamed(9, 6)));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft);
}

// The name alone is not enough for a place in the schedule, since the batch moves the agreed
// tensor.
TEST(ScheduleReplay, ARequestThatDiffersFromThePlannedOneIsNotInTheSchedule) {
  for (int change = 0; change < 6; ++change) {
    Ranks ranks(1);
    ranks.enter({batch({"a"})});
    wire::Request asked = request("a");
    if (change == 0) asked.dtype = DataType::kFloat64;
    if (change == 1) asked.shape = {1048576};
    if (change == 2) asked.op = ReduceOp::kMax;
    if (change == 3) asked.prescale = 0.5;
    if (change == 4) asked.compression = Compression::kFloat16;
    if (change == 5) asked.device = DeviceType::kCuda;
    EXPECT_FALSE(offer(ranks[0], asked)) << change;
    EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft) << change;
  }
}

TEST(ScheduleReplay, RunsABatchOnceEveryRankHasAllOfIt) {
  Ranks ranks(2);
  ranks.enter({batch({"a", "b"}), batch({"c"})});
  offer(ranks[0], request("a"));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  offer(ranks[0], request("b"));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  EXPECT_FALSE(ranks[0].lacks_own());
  offer(ranks[1], request("b"));
  offer(ranks[1], request("a"));
  const auto last = ranks[1].advance();
  EXPECT_EQ(ran(ranks[1], last), "a");
  EXPECT_TRUE(last.ring) << "the other may sleep";
  EXPECT_EQ(runs(ranks[0]), "a");
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  EXPECT_TRUE(ranks[0].lacks_own());
}

TEST(ScheduleReplay, TheLastRankWakesThoseThatDoNotPoll) {
  Ranks ranks(4);
  ranks.enter({batch({"a"})});
  for (std::size_t rank = 0; rank < 4; ++rank) offer(ranks[rank], request("a"));
  ranks[0].advance(true);
  ranks[1].advance(false);
  ranks[2].advance(true);
  EXPECT_TRUE(ranks[2].stop_polling()) << "it has to look once more";
  EXPECT_FALSE(ranks[2].stop_polling());
  EXPECT_FALSE(ranks[1].stop_polling()) << "it has not polled";
  const auto last = ranks[3].advance(true);
  EXPECT_EQ(last.outcome, Outcome::kRun);
  EXPECT_TRUE(last.ring);
  EXPECT_FALSE(ranks[3].has_to_be_woken(0));
  EXPECT_TRUE(ranks[3].has_to_be_woken(1));
  EXPECT_TRUE(ranks[3].has_to_be_woken(2));
}

TEST(ScheduleReplay, PollingEndsWithThePosition) {
  Ranks ranks(2);
  ranks.enter({batch({"a"}), batch({"b"})});
  offer(ranks[0], request("a"));
  offer(ranks[1], request("a"));
  ranks[0].advance(true);
  EXPECT_EQ(runs(ranks[1]), "a");
  EXPECT_EQ(runs(ranks[0]), "a");
  EXPECT_FALSE(ranks[0].stop_polling()) << "no other rank relies on it";
  offer(ranks[0], request("b"));
  offer(ranks[1], request("b"));
  ranks[0].advance(false);
  EXPECT_EQ(runs(ranks[1]), "b");
  EXPECT_TRUE(ranks[1].has_to_be_woken(0));
}

TEST(ScheduleReplay, TellsTheBatchThatItArrivesWith) {
  Ranks ranks(2);
  ranks.enter_bundles({{batch({"a", "b"})}, {batch({"c"}), batch({"d"})}});
  EXPECT_FALSE(ranks[0].arrives_with());
  offer(ranks[0], request("a"));
  EXPECT_FALSE(ranks[0].arrives_with()) << "'b' is missing";
  offer(ranks[0], request("b"));
  EXPECT_EQ(ranks[0].arrives_with(), 0U);
  ranks[0].advance();
  EXPECT_FALSE(ranks[0].arrives_with()) << "it has arrived";
  offer(ranks[1], request("a"));
  offer(ranks[1], request("b"));
  EXPECT_EQ(runs(ranks[1]), "a");
  offer(ranks[1], request("c"));
  offer(ranks[1], request("d"));
  EXPECT_FALSE(ranks[1].arrives_with()) << "the bundle has two batches";
  ranks[1].leave_soon();
  EXPECT_FALSE(ranks[1].arrives_with());
}

TEST(ScheduleReplay, GoesRoundAndRound) {
  Ranks ranks(3);
  ranks.enter({batch({"a"}), batch({"b"})});
  for (int step = 0; step < 5; ++step) {
    for (const char* const name : {"a", "b"}) {
      for (std::size_t rank = 0; rank < 3; ++rank) offer(ranks[rank], request(name));
      for (const std::size_t rank : {0, 1, 2, 0, 1}) {
        const auto advance = ranks[rank].advance();
        if (advance.outcome == Outcome::kRun) {
          EXPECT_EQ(ran(ranks[rank], advance), name);
        }
      }
    }
  }
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].batches_run(), 10U);
}

TEST(ScheduleReplay, AllLeaveWhereOneDoes) {
  for (const auto& deviate : std::vector<void (*)(ScheduleReplay&)>{
           [](ScheduleReplay& replay) { offer(replay, request("extra")); },
           [](ScheduleReplay& replay) { offer(replay, request("a", 5)); },
           [](ScheduleReplay& replay) { replay.leave_soon(); }}) {
    Ranks ranks(3);
    ranks.enter({batch({"a"})});
    offer(ranks[0], request("a"));
    EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
    deviate(ranks[1]);
    const auto first = ranks[1].advance();
    EXPECT_EQ(first.outcome, Outcome::kLeft);
    EXPECT_TRUE(first.ring);
    EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft)
        << "it leaves although it had arrived ready";
    EXPECT_EQ(ranks[2].advance().outcome, Outcome::kLeft)
        << "it leaves although it had not arrived";
    EXPECT_FALSE(ranks[2].replaying());
  }
}

TEST(ScheduleReplay, ReadyOperationsRunBeforeItLeaves) {
  Ranks ranks(2);
  ranks.enter({batch({"a"}), batch({"b"})});
  offer(ranks[0], request("a"));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  ranks[0].leave_soon();
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing) << "it has promised to run the first";
  offer(ranks[1], request("a"));
  EXPECT_EQ(runs(ranks[1]), "a");
  EXPECT_EQ(runs(ranks[0]), "a");
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft);
  EXPECT_EQ(ranks[1].advance().outcome, Outcome::kLeft);
}

TEST(ScheduleReplay, ARankThatWaitsCanAskTheOthersToLeave) {
  Ranks ranks(2);
  ranks.enter({batch({"a"})});
  offer(ranks[0], request("a"));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  ranks[0].request_leave();
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  EXPECT_EQ(ranks[1].advance().outcome, Outcome::kLeft);
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft);
}

TEST(ScheduleReplay, ASecondLockDoesNotTakeTheFirstOnesWordsForItsOwn) {
  Ranks ranks(2);
  ranks.enter({batch({"a"})});
  ranks[0].leave_soon();
  ranks[0].advance();
  ranks[1].advance();
  ranks.enter({batch({"a"})});
  offer(ranks[0], request("a"));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing) << "the other has not arrived";
  offer(ranks[1], request("a"));
  EXPECT_EQ(runs(ranks[1]), "a");
  EXPECT_EQ(runs(ranks[0]), "a");
}

TEST(ScheduleReplay, TheBatchesOfABundleRunTogetherOrNotAtAll) {
  Ranks ranks(2);
  ranks.enter_bundles({{batch({"a", "b"}), batch({"c"})}, {batch({"d"})}});
  for (const char* const name : {"a", "b", "c"}) offer(ranks[0], request(name));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kNothing);
  for (const char* const name : {"a", "b", "d"}) offer(ranks[1], request(name));
  EXPECT_EQ(ranks[1].advance().outcome, Outcome::kNothing) << "its first batch is complete";
  EXPECT_TRUE(ranks[1].lacks_own());
  offer(ranks[1], request("c"));
  for (const std::size_t rank : {1, 0}) {
    const auto advance = ranks[rank].advance();
    EXPECT_EQ(advance.outcome, Outcome::kRun);
    EXPECT_EQ(advance.batch, 0U);
    EXPECT_EQ(advance.batches, 2U);
    EXPECT_EQ(ranks[rank].batches_run(), 2U);
  }
  offer(ranks[0], request("d"));
  ranks[0].advance();
  const auto last = ranks[1].advance();
  EXPECT_EQ(last.batch, 2U);
  EXPECT_EQ(last.batches, 1U);
  ranks[0].advance();
  for (const char* const name : {"a", "b"}) offer(ranks[0], request(name));
  for (const char* const name : {"a", "b", "c"}) offer(ranks[1], request(name));
  ranks[1].advance();
  ranks[0].leave_soon();
  for (const std::size_t rank : {0, 1}) EXPECT_EQ(ranks[rank].advance().outcome, Outcome::kLeft);
  for (const std::size_t rank : {0, 1}) EXPECT_EQ(ranks[rank].batches_run(), 3U);
}

// The schedule has one place for two operations of the same kind that are under way together.
TEST(ScheduleReplay, AnOperationWhosePlaceIsTakenEndsTheReplay) {
  const auto unnamed = [](std::uint64_t ordinal) {
    wire::Request asked = request(wire::unnamed_name(OpKind::kAllreduce, ordinal));
    asked.unnamed = true;
    asked.ordinal = ordinal;
    return asked;
  };
  Ranks ranks(2);
  AgreedBatch one;
  one.operations.push_back({unnamed(0)});
  ranks.enter({batch({"a"}), one});
  EXPECT_TRUE(offer(ranks[0], unnamed(1)));
  EXPECT_FALSE(offer(ranks[0], unnamed(2)));
  offer(ranks[0], request("a"));
  for (const std::size_t rank : {0, 1}) EXPECT_EQ(ranks[rank].advance().outcome, Outcome::kLeft);
}

// The members of an unnamed group are identified by their parameters, and may be in different
// bundles.
TEST(ScheduleReplay, AnUnnamedGroupThatIsPutTogetherAnewEndsTheReplay) {
  const auto member = [](std::uint64_t ordinal, int index, std::int64_t elements) {
    wire::Request asked = request(wire::unnamed_name(OpKind::kAllreduce, ordinal), elements);
    asked.unnamed = true;
    asked.ordinal = ordinal;
    asked.group_size = 2;
    asked.group_index = index;
    return asked;
  };
  Ranks ranks(1);
  AgreedBatch first, second;
  first.operations = {{member(0, 0, 1)}, {member(1, 1, 2)}};
  second.operations = {{member(2, 0, 3)}, {member(3, 1, 4)}};
  ranks.enter({first, second});
  EXPECT_TRUE(offer(ranks[0], member(4, 0, 1)));
  EXPECT_TRUE(offer(ranks[0], member(5, 1, 2)));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kRun);
  EXPECT_TRUE(offer(ranks[0], member(6, 0, 3)));
  EXPECT_FALSE(offer(ranks[0], member(7, 1, 2)));
  EXPECT_EQ(ranks[0].advance().outcome, Outcome::kLeft);
}

// Random interleavings and deviations: every rank runs the same number of batches, and leaves
// there.
TEST(ScheduleReplay, RanksAgreeInEveryInterleaving) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    Ranks ranks(3);
    ranks.enter({batch({"a", "b"}), batch({"c"}), batch({"d"})});
    std::array<std::vector<std::string>, 3> to_offer;
    for (auto& names : to_offer) {
      for (int step = 0; step < 3; ++step) names.insert(names.end(), {"a", "b", "c", "d"});
    }
    std::array<std::size_t, 3> offered{};
    std::array<std::size_t, 3> open{};  // offered and not run
    std::array<int, 3> done{};
    std::array<bool, 3> left{};
    for (int action = 0; action < 400; ++action) {
      const std::size_t rank = random() % 3;
      if (random() % 60 == 0) ranks[rank].leave_soon();
      // A name is offered again only once its last use has run.
      if (!left[rank] && offered[rank] < to_offer[rank].size() && open[rank] < 4 &&
          random() % 2 == 0) {
        offer(ranks[rank], request(to_offer[rank][offered[rank]++]));
        ++open[rank];
      }
      const auto advance = ranks[rank].advance();
      if (advance.outcome == Outcome::kRun) {
        ++done[rank];
        open[rank] -= ranks[rank].batch(advance.batch).operations.size();
      }
      left[rank] = left[rank] || advance.outcome == Outcome::kLeft;
    }
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (int more = 0; more < 5 && (left[0] || left[1] || left[2]); ++more) {
        const auto advance = ranks[rank].advance();
        if (advance.outcome == Outcome::kRun) ++done[rank];
        left[rank] = left[rank] || advance.outcome == Outcome::kLeft;
      }
    }
    if (!left[0] && !left[1] && !left[2]) continue;
    EXPECT_TRUE(left[0] && left[1] && left[2]) << "seed " << seed;
    EXPECT_TRUE(done[0] == done[1] && done[1] == done[2])
        << "seed " << seed << ": " << done[0] << " " << done[1] << " " << done[2];
  }
}

class Learner : public ::testing::Test {
 protected:
  Learner() {
    for (const char* const name : {"a", "b", "c", "d"}) cache_.put({request(name)}, 1);
  }
  static wire::Plan plan(const std::vector<std::vector<std::uint32_t>>& batches) {
    wire::Plan made;
    for (const auto& slots : batches) {
      wire::Batch one;
      for (const std::uint32_t slot : slots) one.tensors.emplace_back(wire::SlotUse{slot});
      made.batches.push_back(one);
    }
    return made;
  }
  /// Slots of the two members of a group.
  std::vector<std::uint32_t> put_group(const std::string& group) {
    std::vector<std::uint32_t> members;
    for (int i = 0; i < 2; ++i) {
      wire::Request member = request(group + std::to_string(i));
      member.group = group;
      member.group_size = 2;
      member.group_index = i;
      cache_.put({member}, 1);
      members.push_back(*cache_.find(member));
    }
    return members;
  }
  bool observe(const std::vector<std::vector<std::uint32_t>>& batches) {
    return learner_.observe(plan(batches), cache_);
  }

  ResponseCache cache_{16};
  StepLearner learner_;
};

TEST_F(Learner, LocksAfterTwoEqualStepsInAnyOrder) {
  EXPECT_FALSE(observe({{0, 1}}));
  EXPECT_FALSE(observe({{2}}));
  EXPECT_FALSE(observe({{1}}));
  EXPECT_TRUE(observe({{2, 0}}));
  EXPECT_EQ(learner_.schedule(), (std::vector<wire::SlotBundle>{{{1}}, {{2, 0}}}));
}

TEST_F(Learner, DoesNotLockStepsThatDiffer) {
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(observe({{0}}));
    EXPECT_FALSE(observe({{1}, {static_cast<std::uint32_t>(2 + i % 2)}}));
  }
}

// Unnamed operations of a kind share a slot.
TEST_F(Learner, DoesNotLockABatchThatHasASlotTwice) {
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(observe({{0, 0}}));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(observe({{1}, {2, 0, 2}}));
}

// A replay that is left after the first of these batches would leave the second member waiting for
// the first, which has run.
TEST_F(Learner, BatchesThatShareAGroupAreABundle) {
  const std::vector<std::uint32_t> members = put_group("group");
  const std::vector<std::uint32_t> others = put_group("other");
  const auto learnt = [&](const std::vector<std::vector<std::uint32_t>>& batches) {
    for (int step = 0; step < 4 && !observe(batches); ++step) {
    }
    learner_.end_replay(100);
    return learner_.schedule();
  };
  EXPECT_EQ(learnt({{0, members[0]}, {1}, {members[1]}}),
            (std::vector<wire::SlotBundle>{{{1}}, {{0, members[0]}, {members[1]}}}));
  EXPECT_EQ(learnt({{0}, {members[1], members[0]}}),
            (std::vector<wire::SlotBundle>{{{0}}, {{members[1], members[0]}}}))
      << "members in one batch run together";
  EXPECT_EQ(
      learnt({{members[0], others[0]}, {members[1]}, {2}, {others[1]}}),
      (std::vector<wire::SlotBundle>{{{2}}, {{members[0], others[0]}, {members[1]}, {others[1]}}}))
      << "both groups share a batch";
}

// Equal steps that were fused differently, depending on the ranks' speed.
TEST_F(Learner, RepeatsTheStepOfTheFewestBatches) {
  EXPECT_FALSE(observe({{0}, {1}, {2}}));
  EXPECT_FALSE(observe({{0, 1}, {2}})) << "it compares";
  EXPECT_FALSE(observe({{0}, {1}, {2}}));
  EXPECT_TRUE(observe({{0}, {1}, {2}}));
  EXPECT_EQ(learner_.schedule(), (std::vector<wire::SlotBundle>{{{0, 1}}, {{2}}}));
  learner_.end_replay(100);
  EXPECT_TRUE(observe({{0}, {1}, {2}}));
  EXPECT_EQ(learner_.schedule().size(), 2U) << "it has lasted";
  learner_.end_replay(100);
  EXPECT_TRUE(observe({{0, 1, 2}}));
  EXPECT_EQ(learner_.schedule().size(), 1U);
}

// The program may need one of the operations before it submits the other.
TEST_F(Learner, AfterAReplayThatDidNotLastTheLastStepIsRepeated) {
  EXPECT_FALSE(observe({{0, 1}}));
  EXPECT_TRUE(observe({{0, 1}}));
  learner_.end_replay(1);
  EXPECT_TRUE(observe({{0}, {1}}));
  EXPECT_EQ(learner_.schedule().size(), 2U);
}

TEST_F(Learner, ForgetsTheBestStepWhenTheCacheChanges) {
  EXPECT_FALSE(observe({{0, 1}}));
  EXPECT_TRUE(observe({{0, 1}}));
  learner_.end_replay(100);
  wire::Plan in_full = plan({{0}});
  in_full.batches[0].tensors[0] = wire::Response{};
  EXPECT_FALSE(learner_.observe(in_full, cache_));
  EXPECT_TRUE(observe({{0}, {1}}));
  EXPECT_EQ(learner_.schedule().size(), 2U) << "slot 1 may have another sort than slot 0 now";
}

// Unnamed groups are distinguished by their ordinals, where the cache has equal members.
TEST_F(Learner, DistinguishesUnnamedGroupsByTheirOrdinals) {
  std::vector<wire::PlannedTensor> members;
  for (std::uint64_t ordinal = 0; ordinal < 4; ++ordinal) {
    wire::Request member = request("", static_cast<std::int64_t>(ordinal + 1));
    member.unnamed = true;
    member.ordinal = ordinal;
    member.group_size = 2;
    member.group_index = static_cast<int>(ordinal % 2);
    cache_.put({member}, 1);
    members.emplace_back(wire::SlotUse{cache_.find(member).value(), ordinal});
  }
  wire::Plan whole = plan({{}, {}}), split = whole;
  whole.batches[0].tensors = {members[0], members[1]};
  whole.batches[1].tensors = {members[2], members[3]};
  split.batches[0].tensors = {members[0], members[1], members[2]};
  split.batches[1].tensors = {members[3]};
  EXPECT_FALSE(learner_.observe(whole, cache_));
  EXPECT_TRUE(learner_.observe(whole, cache_));
  EXPECT_EQ(learner_.schedule().size(), 2U);
  learner_.end_replay(1);
  EXPECT_TRUE(learner_.observe(split, cache_));
  EXPECT_EQ(learner_.schedule().size(), 1U);
}

TEST_F(Learner, LocksAKnownScheduleAgainAfterOneStep) {
  observe({{0, 1}});
  ASSERT_TRUE(observe({{0, 1}}));
  learner_.end_replay(100);
  EXPECT_FALSE(observe({{2}}));
  EXPECT_FALSE(observe({{0}}));  // the step that contains 2 is a different one
  EXPECT_FALSE(observe({{1}}));
  EXPECT_TRUE(observe({{0, 1}}));
}

TEST_F(Learner, WaitsLongerAndLongerWhenLocksDoNotLast) {
  observe({{0}});
  ASSERT_TRUE(observe({{0}}));
  int steps = 0;
  for (const int expected : {1, 2, 4, 8}) {
    learner_.end_replay(1);
    steps = 1;
    while (!observe({{0}})) ++steps;
    EXPECT_EQ(steps, expected);
  }
  learner_.end_replay(100);
  EXPECT_TRUE(observe({{0}})) << "a lock that lasted makes up for it";
}

TEST_F(Learner, DoesNotLockNewFailedOrIncompleteOperations) {
  const std::vector<std::vector<std::uint32_t>> step{{0}};
  observe(step);
  wire::Plan other = plan(step);
  other.batches[0].absent = {1};
  EXPECT_FALSE(learner_.observe(other, cache_));
  EXPECT_FALSE(observe(step)) << "the learner has started again";
  other = plan(step);
  other.errors.emplace_back();
  EXPECT_FALSE(learner_.observe(other, cache_));
  observe(step);
  other = plan(step);
  other.batches[0].tensors[0] = wire::Response{};
  EXPECT_FALSE(learner_.observe(other, cache_));
  EXPECT_FALSE(observe(step));
  EXPECT_TRUE(observe(step));
}

}  // namespace
}  // namespace hvd::control
