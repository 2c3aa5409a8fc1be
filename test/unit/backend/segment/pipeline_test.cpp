#include "backend/segment/pipeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/seeds.h"

// Members of one host, stepped by one thread in random order. Their slots hold numbers of rounds
// instead of data, so that one that is used too early or too late is seen at once; and a member
// that has nothing to do sleeps until it is rung, so that a ring that is missing is seen, too.

namespace hvd::segment {
namespace {

using State = ChannelSegment::MemberState;

// The rules of the backend shm ...
constexpr PhaseRule kForOneself[] = {{Phase::kFill, &State::filled, &State::released, 2},
                                     {Phase::kReduce, &State::released, &State::filled}};
constexpr PhaseRule kForAll[] = {{Phase::kFill, &State::filled, &State::released, 2},
                                 {Phase::kReduce, &State::reduced, &State::filled},
                                 {Phase::kTake, &State::released, &State::reduced}};
// ... and those of hierarchical.
constexpr PhaseRule kOfAHost[] = {{Phase::kFill, &State::filled, &State::reduced, 2},
                                  {Phase::kReduce, &State::reduced},
                                  {Phase::kSettle, &State::settled},
                                  {Phase::kTake, nullptr, &State::settled},
                                  {Phase::kRelease, &State::released}};

std::string next_name() {
  static int names = 0;
  return "/hvd-test-" + std::to_string(::getpid()) + "-pipeline-" + std::to_string(++names);
}

class RingingPeers final : public Peers {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 8; }
  void ring(int world_rank) noexcept override { on_ring(world_rank); }
  std::function<void(int)> on_ring = [](int) {};
};

constexpr std::size_t kSlotBytes = 128;
std::uint64_t& word(std::byte* slot, std::size_t at = 0) {
  return reinterpret_cast<std::uint64_t*>(slot)[at];
}

struct Collective {
  PhaseRules rules;
  std::uint64_t rounds = 0;
};

class Host {
 public:
  Host(std::size_t size, std::uint64_t results, std::uint64_t seed,
       std::vector<Collective> collectives)
      : results_(results), collectives_(std::move(collectives)), random_(seed) {
    const std::string name = next_name();
    std::vector<int> ranks(size);
    for (std::size_t rank = 0; rank < size; ++rank) ranks[rank] = static_cast<int>(rank);
    for (std::size_t rank = 0; rank < size; ++rank)
      members_.emplace_back(Membership{name, ranks, rank}, SlotLayout{kSlotBytes, results}, peers_);
    for (Member& member : members_) EXPECT_TRUE(member.segment.ready() || size > 1);
    for (Member& member : members_) EXPECT_TRUE(member.segment.ready());
    for (Member& member : members_) begin(member);
    peers_.on_ring = [this](int rank) { wake(static_cast<std::size_t>(rank)); };
  }

  /// False: all sleep, and not all are done.
  bool run() {
    for (;;) {
      std::vector<std::size_t> awake;
      bool done = true;
      for (std::size_t at = 0; at < members_.size(); ++at) {
        if (members_[at].collective < collectives_.size()) done = false;
        if (members_[at].awake) awake.push_back(at);
      }
      if (done) return true;
      if (awake.empty()) return false;
      step(awake[random_() % awake.size()]);
    }
  }
  std::uint64_t reduced_and_taken() const { return checks_; }

 private:
  struct Member {
    Member(Membership membership, const SlotLayout& layout, Peers& peers)
        : segment(std::move(membership), layout, peers), pipeline(segment) {}
    ChannelSegment segment;
    Pipeline pipeline;
    std::size_t collective = 0;
    bool awake = true;
    bool busy = false;
  };

  void begin(Member& member) {
    const Collective& next = collectives_[member.collective];
    member.pipeline.begin(next.rules, next.rounds);
  }

  // A ring may be heard at once: whoever rings must have told before.
  void wake(std::size_t at) {
    members_[at].awake = true;
    if (!members_[at].busy && random_() % 2 == 0) step(at);
  }

  void step(std::size_t at) {
    Member& member = members_[at];
    if (member.collective == collectives_.size()) {
      member.awake = false;
      return;
    }
    member.busy = true;
    member.awake = false;
    const auto run_phase = [&](Phase phase, std::uint64_t round) { return run(at, phase, round); };
    // Sometimes another member comes in between.
    bool moved = false;
    while (member.pipeline.advance(run_phase)) {
      moved = true;
      if (random_() % 3 == 0) break;
    }
    if (moved) member.awake = true;
    const bool finished = member.pipeline.finish();
    member.pipeline.ring();
    if (finished) {
      member.awake = true;
      if (++member.collective < collectives_.size()) begin(member);
    }
    member.busy = false;
  }

  /// What comes by messages may come later; then the member is asked again.
  bool message_is_late(Member& member) {
    if (random_() % 3 != 0) return false;
    member.awake = true;
    return true;
  }

  bool run(std::size_t at, Phase phase, std::uint64_t round) {
    Member& member = members_[at];
    const bool of_a_host = collectives_[member.collective].rules.size() == 5;
    const std::uint64_t number = member.pipeline.number(round);
    switch (phase) {
      case Phase::kFill:
        word(member.segment.input(number, at)) = number + 1;
        return true;
      case Phase::kReduce:
        if (of_a_host && !(member.pipeline.reached(&State::filled, round) &&
                           member.pipeline.reached(&State::released, round, results_)))
          return false;
        for (std::size_t other = 0; other < members_.size(); ++other)
          EXPECT_EQ(word(member.segment.input(number, other)), number + 1)
              << "member " << at << " reads the slot of " << other;
        word(member.segment.result(number), at) = number + 1;
        ++checks_;
        return true;
      case Phase::kSettle:
        return !message_is_late(member);
      case Phase::kTake:
        for (std::size_t other = 0; other < members_.size(); ++other)
          EXPECT_EQ(word(member.segment.result(number), other), number + 1)
              << "member " << at << " takes what " << other << " has reduced";
        ++checks_;
        return true;
      case Phase::kRelease:
        if (message_is_late(member)) return false;
        for (std::size_t other = 0; other < members_.size(); ++other)
          EXPECT_EQ(word(member.segment.result(number), other), number + 1)
              << "member " << at << " still sends what " << other << " has put here";
        return true;
    }
    return false;
  }

  const std::uint64_t results_;
  const std::vector<Collective> collectives_;
  std::mt19937_64 random_;
  RingingPeers peers_;
  std::deque<Member> members_;
  std::uint64_t checks_ = 0;
};

TEST(Pipeline, MembersOfShmNeverMeetTheWrongRoundAndAreAlwaysWoken) {
  const std::uint64_t seeds = testing::seeds(300, 10'000);
  for (std::uint64_t seed = 0; seed < seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Collective> collectives;
    std::uint64_t expected = 0;
    const std::size_t size = 2 + seed % 3;
    for (int count = 0; count < 12; ++count) {
      const bool for_all = random() % 2 == 0;
      collectives.push_back(
          {for_all ? PhaseRules(kForAll) : PhaseRules(kForOneself), random() % 6});
      expected += size * collectives.back().rounds * (for_all ? 2 : 1);
    }
    Host host(size, 2, seed, collectives);
    ASSERT_TRUE(host.run()) << "all sleep";
    EXPECT_EQ(host.reduced_and_taken(), expected);
  }
}

TEST(Pipeline, MembersOfAHostNeverMeetTheWrongRoundAndAreAlwaysWoken) {
  const std::uint64_t seeds = testing::seeds(300, 10'000);
  for (std::uint64_t seed = 0; seed < seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Collective> collectives;
    std::uint64_t expected = 0;
    const std::size_t size = 1 + seed % 4;
    for (int count = 0; count < 6; ++count) {
      collectives.push_back({kOfAHost, random() % 12});
      expected += size * collectives.back().rounds * 2;
    }
    Host host(size, 4, seed, collectives);
    ASSERT_TRUE(host.run()) << "all sleep";
    EXPECT_EQ(host.reduced_and_taken(), expected);
  }
}

/// Two members, of which the test steps each by hand.
class TwoMembers : public ::testing::Test {
 protected:
  TwoMembers() {
    peers.on_ring = [this](int rank) { ++rings[static_cast<std::size_t>(rank)]; };
    static_cast<void>(first.ready() && second.ready());
    static_cast<void>(second.ready());
    rings = {};
    EXPECT_TRUE(first.ready());
  }
  static bool advance(Pipeline& pipeline) {
    return pipeline.advance([](Phase, std::uint64_t) { return true; });
  }

  const std::string name = next_name();
  const SlotLayout layout{.slot_bytes = kSlotBytes, .results = 2};
  RingingPeers peers;
  std::array<int, 2> rings = {};
  ChannelSegment first{Membership{name, {0, 1}, 0}, layout, peers};
  ChannelSegment second{Membership{name, {0, 1}, 1}, layout, peers};
  Pipeline one{first};
  Pipeline two{second};
};

TEST_F(TwoMembers, APhaseIsToldOnceItIsDone) {
  one.begin(kForAll, 1);
  two.begin(kForAll, 1);
  ASSERT_TRUE(one.advance([&](Phase phase, std::uint64_t) {
    EXPECT_EQ(phase, Phase::kFill);
    EXPECT_FALSE(second.other_reached(&State::filled, 1)) << "it is being done";
    return true;
  }));
  EXPECT_TRUE(second.other_reached(&State::filled, 1));
}

TEST_F(TwoMembers, APhaseThatIsNotYetToBeDoneIsNotTold) {
  one.begin(kForAll, 1);
  EXPECT_FALSE(one.advance([](Phase, std::uint64_t) { return false; }));
  EXPECT_EQ(one.done(Phase::kFill), 0U);
  EXPECT_FALSE(second.other_reached(&State::filled, 1));
}

TEST_F(TwoMembers, OnlyTheLastOneRings) {
  one.begin(kForAll, 1);
  two.begin(kForAll, 1);
  ASSERT_TRUE(advance(one));
  one.ring();
  EXPECT_EQ(rings, (std::array{0, 0})) << "the other one has to fill, too";
  ASSERT_TRUE(advance(two));
  two.ring();
  EXPECT_EQ(rings, (std::array{1, 0}));
  two.ring();
  EXPECT_EQ(rings, (std::array{1, 0})) << "once is enough";
}

TEST_F(TwoMembers, WhoFreesASlotRingsOnlyThoseWhoWaitForIt) {
  one.begin(kForOneself, 3);
  two.begin(kForOneself, 3);
  ASSERT_TRUE(advance(one) && advance(one));
  EXPECT_FALSE(advance(one)) << "both buffers are full";
  ASSERT_TRUE(advance(two));
  two.ring();
  rings = {};
  ASSERT_TRUE(advance(one));  // reduces round 0
  one.ring();
  EXPECT_EQ(rings, (std::array{0, 0})) << "the other one has not";
  EXPECT_FALSE(advance(one)) << "round 2 goes where the other one still reads round 0";
  ASSERT_TRUE(advance(two));  // reduces round 0
  two.ring();
  EXPECT_EQ(rings, (std::array{1, 0})) << "that was what it waited for";
  EXPECT_TRUE(advance(one));
}

TEST_F(TwoMembers, WhoFreesASlotThatNobodyWaitsForRingsNobody) {
  one.begin(kForOneself, 1);
  two.begin(kForOneself, 1);
  ASSERT_TRUE(advance(one) && advance(two) && advance(one));
  one.ring();
  two.ring();
  rings = {};
  ASSERT_TRUE(advance(two));
  two.ring();
  EXPECT_EQ(rings, (std::array{0, 0})) << "a collective of one round ends without a ring";
  EXPECT_TRUE(one.finish() && two.finish());
}

TEST_F(TwoMembers, TheNextCollectiveIsNumberedOn) {
  for (const std::uint64_t rounds : {3U, 0U, 2U}) {
    const std::uint64_t begin = first.next_round;
    one.begin(kForOneself, rounds);
    two.begin(kForOneself, rounds);
    EXPECT_EQ(one.number(1), begin + 1);
    for (bool moves = true; moves;) {
      EXPECT_EQ(one.finish(), one.done(Phase::kReduce) == rounds);
      EXPECT_EQ(first.next_round, one.finish() ? begin + rounds : begin);
      moves = advance(one);
      moves = advance(two) || moves;
    }
    EXPECT_TRUE(one.finish());
    EXPECT_TRUE(two.finish());
    EXPECT_EQ(first.next_round, begin + rounds);
    EXPECT_EQ(second.next_round, begin + rounds);
  }
}

// The backend shm finds out in the first round how many there are, and whether to take.
TEST_F(TwoMembers, RulesAndRoundsMayChangeInAPhase) {
  for (Pipeline* pipeline : {&one, &two}) pipeline->begin(kForOneself, 1);
  for (Pipeline* pipeline : {&one, &two}) ASSERT_TRUE(advance(*pipeline));
  ASSERT_TRUE(one.advance([&](Phase phase, std::uint64_t) {
    EXPECT_EQ(phase, Phase::kReduce);
    one.set_rules(kForAll);
    one.set_rounds(2);
    return true;
  }));
  EXPECT_TRUE(second.other_reached(&State::reduced, 1));
  EXPECT_FALSE(second.other_reached(&State::released, 1)) << "it has not taken yet";
  EXPECT_EQ(one.rounds(), 2U);
  EXPECT_FALSE(one.finish());
  EXPECT_TRUE(advance(one));
  EXPECT_EQ(one.done(Phase::kFill), 2U);
}

}  // namespace
}  // namespace hvd::segment
