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

#include "support/fakes.h"
#include "support/seeds.h"

// One thread steps the members of a host in random order. Their buffers hold numbers of rounds
// instead of data, so that a use at the wrong time is detected. A member without work sleeps until
// it is rung, so that a missing ring is detected too.

namespace hvd::segment {
namespace {

using State = ChannelSegment::MemberState;

// The rules of the backend shm ...
constexpr PhaseRule kEachForItself[] = {{RoundPhase::kFill, &State::filled, &State::released, 2},
                                        {RoundPhase::kReduce, &State::released, &State::filled}};
constexpr PhaseRule kForAll[] = {{RoundPhase::kFill, &State::filled, &State::released, 2},
                                 {RoundPhase::kReduce, &State::reduced, &State::filled},
                                 {RoundPhase::kCopyOut, &State::released, &State::reduced}};
// ... and those of hierarchical.
constexpr PhaseRule kOfAHost[] = {{RoundPhase::kFill, &State::filled, &State::reduced, 2},
                                  {RoundPhase::kReduce, &State::reduced},
                                  {RoundPhase::kSettle, &State::settled},
                                  {RoundPhase::kCopyOut, nullptr, &State::settled},
                                  {RoundPhase::kRelease, &State::released}};

std::string next_name() {
  static int names = 0;
  return "/hvd-test-" + std::to_string(::getpid()) + "-pipeline-" + std::to_string(++names);
}

constexpr std::size_t kWordBytes = 128;
std::uint64_t& word(std::byte* buffer, std::size_t at = 0) {
  return reinterpret_cast<std::uint64_t*>(buffer)[at];
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
      members_.emplace_back(SegmentMembers{name, ranks, rank}, BufferLayout{kWordBytes, results},
                            peers_);
    for (Member& member : members_) EXPECT_TRUE(member.segment.ready() || size > 1);
    for (Member& member : members_) EXPECT_TRUE(member.segment.ready());
    for (Member& member : members_) begin(member);
    peers_.on_ring = [this](int rank) { wake(static_cast<std::size_t>(rank)); };
  }

  /// @return false if all members sleep, and not all of them are done
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
  std::uint64_t checks() const { return checks_; }

 private:
  struct Member {
    Member(SegmentMembers its_members, const BufferLayout& layout, Peers& peers)
        : segment(std::move(its_members), layout, peers), pipeline(segment) {}
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

  // A rung member may run at once, so a member must publish before it rings.
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
    const auto run_phase = [&](RoundPhase phase, std::uint64_t round) {
      return run(at, phase, round);
    };
    // Sometimes another member runs in between.
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

  /// Simulates a message that arrives later. The member then tries again.
  bool message_is_late(Member& member) {
    if (random_() % 3 != 0) return false;
    member.awake = true;
    return true;
  }

  bool run(std::size_t at, RoundPhase phase, std::uint64_t round) {
    Member& member = members_[at];
    const bool of_a_host = collectives_[member.collective].rules.size() == 5;
    const std::uint64_t number = member.pipeline.number(round);
    switch (phase) {
      case RoundPhase::kFill:
        word(member.segment.input(number, at)) = number + 1;
        return true;
      case RoundPhase::kReduce:
        if (of_a_host && !(member.pipeline.reached(&State::filled, round) &&
                           member.pipeline.reached(&State::released, round, results_)))
          return false;
        for (std::size_t other = 0; other < members_.size(); ++other)
          EXPECT_EQ(word(member.segment.input(number, other)), number + 1)
              << "member " << at << " reads the buffer of " << other;
        word(member.segment.result(number), at) = number + 1;
        ++checks_;
        return true;
      case RoundPhase::kSettle:
        return !message_is_late(member);
      case RoundPhase::kCopyOut:
        for (std::size_t other = 0; other < members_.size(); ++other)
          EXPECT_EQ(word(member.segment.result(number), other), number + 1)
              << "member " << at << " copies the slice that " << other << " has reduced";
        ++checks_;
        return true;
      case RoundPhase::kRelease:
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
  testing::FakePeers peers_;
  std::deque<Member> members_;
  std::uint64_t checks_ = 0;
};

/// Runs collectives with randomly drawn rules and numbers of rounds, on different numbers of
/// members.
void run_at_random(const std::vector<PhaseRules>& rules, std::uint64_t results, int collectives,
                   std::uint64_t rounds, const std::vector<std::size_t>& members) {
  const std::uint64_t seeds = testing::seeds(300, 10'000);
  for (std::uint64_t seed = 0; seed < seeds && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Collective> drawn;
    std::uint64_t expected = 0;
    const std::size_t size = members[seed % members.size()];
    for (int count = 0; count < collectives; ++count) {
      drawn.push_back({rules[random() % rules.size()], random() % rounds});
      const bool copies_out = drawn.back().rules.size() > 2;
      expected += size * drawn.back().rounds * (copies_out ? 2 : 1);
    }
    Host host(size, results, seed, drawn);
    ASSERT_TRUE(host.run()) << "all sleep";
    EXPECT_EQ(host.checks(), expected);
  }
}

TEST(Pipeline, ShmMembersNeverReadTheWrongRoundAndAreAlwaysWoken) {
  run_at_random({kForAll, kEachForItself}, 2, 12, 6, {2, 3, 4});
}

TEST(Pipeline, HierarchicalMembersNeverReadTheWrongRoundAndAreAlwaysWoken) {
  run_at_random({kOfAHost}, 4, 6, 12, {1, 2, 3, 4});
}

/// Two members that the test steps one by one.
class TwoMembers : public ::testing::Test {
 protected:
  TwoMembers() {
    static_cast<void>(first.ready() && second.ready());
    static_cast<void>(second.ready());
    EXPECT_TRUE(first.ready());
    new_rings();
  }
  static bool advance(Pipeline& pipeline) {
    return pipeline.advance([](RoundPhase, std::uint64_t) { return true; });
  }

  /// The rings of the two members' doorbells since the last call.
  std::array<int, 2> new_rings() {
    const std::array<int, 2> before = std::exchange(seen, {peers.rung(0), peers.rung(1)});
    return {seen[0] - before[0], seen[1] - before[1]};
  }

  const std::string name = next_name();
  const BufferLayout layout{.buffer_bytes = kWordBytes, .results = 2};
  testing::FakePeers peers;
  std::array<int, 2> seen = {};
  ChannelSegment first{SegmentMembers{name, {0, 1}, 0}, layout, peers};
  ChannelSegment second{SegmentMembers{name, {0, 1}, 1}, layout, peers};
  Pipeline one{first};
  Pipeline two{second};
};

TEST_F(TwoMembers, APhaseIsPublishedOnceItIsDone) {
  one.begin(kForAll, 1);
  two.begin(kForAll, 1);
  ASSERT_TRUE(one.advance([&](RoundPhase phase, std::uint64_t) {
    EXPECT_EQ(phase, RoundPhase::kFill);
    EXPECT_FALSE(second.other_reached(&State::filled, 1)) << "the phase is still running";
    return true;
  }));
  EXPECT_TRUE(second.other_reached(&State::filled, 1));
}

TEST_F(TwoMembers, APhaseThatCannotRunYetIsNotPublished) {
  one.begin(kForAll, 1);
  EXPECT_FALSE(one.advance([](RoundPhase, std::uint64_t) { return false; }));
  EXPECT_EQ(one.done(RoundPhase::kFill), 0U);
  EXPECT_FALSE(second.other_reached(&State::filled, 1));
}

TEST_F(TwoMembers, OnlyTheLastMemberRings) {
  one.begin(kForAll, 1);
  two.begin(kForAll, 1);
  ASSERT_TRUE(advance(one));
  one.ring();
  EXPECT_EQ(new_rings(), (std::array{0, 0})) << "the other member has not filled its buffer yet";
  ASSERT_TRUE(advance(two));
  two.ring();
  two.ring();
  EXPECT_EQ(new_rings(), (std::array{1, 0})) << "it rings once only";
}

TEST_F(TwoMembers, FreeingABufferRingsOnlyMembersThatWaitForIt) {
  one.begin(kEachForItself, 3);
  two.begin(kEachForItself, 3);
  ASSERT_TRUE(advance(one) && advance(one));
  EXPECT_FALSE(advance(one)) << "both buffers are full";
  ASSERT_TRUE(advance(two));
  two.ring();
  new_rings();
  ASSERT_TRUE(advance(one));  // reduces round 0
  one.ring();
  EXPECT_EQ(new_rings(), (std::array{0, 0})) << "the other member has not reduced it yet";
  EXPECT_FALSE(advance(one)) << "the other member still reads round 0 from the buffer of round 2";
  ASSERT_TRUE(advance(two));  // reduces round 0
  two.ring();
  EXPECT_EQ(new_rings(), (std::array{1, 0})) << "the other member waited for this buffer";
  EXPECT_TRUE(advance(one));
}

TEST_F(TwoMembers, FreeingABufferThatNoMemberWaitsForDoesNotRing) {
  one.begin(kEachForItself, 1);
  two.begin(kEachForItself, 1);
  ASSERT_TRUE(advance(one) && advance(two) && advance(one));
  one.ring();
  two.ring();
  new_rings();
  ASSERT_TRUE(advance(two));
  two.ring();
  EXPECT_EQ(new_rings(), (std::array{0, 0})) << "a collective of one round ends without a ring";
  EXPECT_TRUE(one.finish() && two.finish());
}

TEST_F(TwoMembers, TheNextCollectiveContinuesTheNumbers) {
  for (const std::uint64_t rounds : {3U, 0U, 2U}) {
    const std::uint64_t begin = first.next_round;
    one.begin(kEachForItself, rounds);
    two.begin(kEachForItself, rounds);
    EXPECT_EQ(one.number(1), begin + 1);
    for (bool moves = true; moves;) {
      EXPECT_EQ(one.finish(), one.done(RoundPhase::kReduce) == rounds);
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

// The shm backend learns in the first round how many rounds there are, and whether to copy out.
TEST_F(TwoMembers, RulesAndRoundsMayChangeInAPhase) {
  for (Pipeline* pipeline : {&one, &two}) pipeline->begin(kEachForItself, 1);
  for (Pipeline* pipeline : {&one, &two}) ASSERT_TRUE(advance(*pipeline));
  ASSERT_TRUE(one.advance([&](RoundPhase phase, std::uint64_t) {
    EXPECT_EQ(phase, RoundPhase::kReduce);
    one.set_rules(kForAll);
    one.set_rounds(2);
    return true;
  }));
  EXPECT_TRUE(second.other_reached(&State::reduced, 1));
  EXPECT_FALSE(second.other_reached(&State::released, 1)) << "it has not copied out yet";
  EXPECT_EQ(one.rounds(), 2U);
  EXPECT_FALSE(one.finish());
  EXPECT_TRUE(advance(one));
  EXPECT_EQ(one.done(RoundPhase::kFill), 2U);
}

}  // namespace
}  // namespace hvd::segment
