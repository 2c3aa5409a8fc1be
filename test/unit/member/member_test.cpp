#include "member/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "support/contracts.h"

namespace hvd::member {
namespace {

using Verdict = Member::Verdict;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr StateSummary kWhole = {.commit = 4, .kind = StateKind::kWhole, .hash = 7};

class MemberTest : public ::testing::Test {
 protected:
  /// The only action since the last call.
  template <class Action>
  Action take() {
    const auto actions = member_.take_actions();
    EXPECT_EQ(actions.size(), 1u);
    if (actions.size() != 1 || !std::holds_alternative<Action>(actions[0])) {
      ADD_FAILURE() << "another action";
      return {};
    }
    return std::get<Action>(actions[0]);
  }
  template <class Message>
  Message take_message() {
    return std::get<Message>(take<Send>().message);
  }
  void expect_nothing() { EXPECT_THAT(member_.take_actions(), IsEmpty()); }

  void become_ready(Generation generation) {
    member_.join();
    take_message<Join>();
    member_.receive(Reset{generation, "start"});
    take<Leave>();
    member_.left(kWhole, true, "a:1");
    take_message<Ready>();
  }
  Assign assign(Generation generation, bool receives) {
    return {.generation = generation,
            .root = 0,
            .state = kWhole,
            .seats = {{.worker = 1}, {.worker = 2, .receives = receives}}};
  }
  void run(Generation generation) {
    become_ready(generation);
    enter(generation);
  }
  void enter(Generation generation) {
    member_.receive(assign(generation, false));
    take<Form>();
    member_.synced(generation, kWhole);
    take_message<Synced>();
    member_.receive(Go{generation});
    EXPECT_EQ(take<member::Run>().generation, generation);
  }

  Member member_{2, "program"};
};

TEST_F(MemberTest, JoinsLeavesFormsAndRuns) {
  member_.join();
  EXPECT_EQ(take_message<Join>().program, "program");
  member_.receive(Reset{3, "worker 9 is lost"});
  EXPECT_EQ(take<Leave>().cause, "worker 9 is lost");
  member_.left(kWhole, true, "a:1");
  EXPECT_EQ(take_message<Ready>(),
            (Ready{.generation = 3, .state = kWhole, .can_load = true, .address = "a:1"}));
  member_.receive(assign(3, true));
  const Form form = take<Form>();
  EXPECT_EQ(form.rank, 1u);
  EXPECT_TRUE(form.receives);
  member_.synced(3, kWhole);
  EXPECT_EQ(take_message<Synced>(), (Synced{3, kWhole}));
  member_.receive(Go{3});
  EXPECT_EQ(take<member::Run>().generation, 3u);
  EXPECT_EQ(member_.phase(), Member::Phase::kRunning);
  EXPECT_EQ(member_.generation(), 3u);
}

TEST_F(MemberTest, ANewerResetStartsOverAtAnyPoint) {
  run(3);
  member_.receive(Reset{4, "a"});
  take<Leave>();
  member_.receive(Reset{5, "b"});
  EXPECT_EQ(take<Leave>().cause, "b") << "what blocks may wait for a worker that is lost now";
  member_.left(kWhole, true, "a:1");
  EXPECT_EQ(take_message<Ready>().generation, 5u);
  member_.receive(Reset{6, "c"});
  EXPECT_EQ(take_message<Ready>().generation, 6u) << "there is nothing left to leave";
  member_.receive(assign(5, false));
  expect_nothing();
  member_.receive(assign(6, false));
  take<Form>();
  member_.receive(Reset{7, "d"});
  take<Leave>();
  member_.synced(6, kWhole);
  expect_nothing();
}

TEST_F(MemberTest, OldMessagesHaveNoEffect) {
  run(3);
  member_.receive(Reset{3, "old"});
  member_.receive(Reset{2, "older"});
  member_.receive(assign(3, true));
  member_.receive(Go{3});
  member_.receive(Prepare{.change = 1, .generation = 2});
  member_.receive(Target{.change = 1, .commit = 9, .next = 4});
  expect_nothing();
  EXPECT_EQ(member_.phase(), Member::Phase::kRunning);
}

TEST_F(MemberTest, AnInterruptedReceiverReportsTheStateThatItHas) {
  become_ready(3);
  member_.receive(assign(3, true));
  take<Form>();
  member_.receive(Reset{4, "the root is lost"});
  take<Leave>();
  member_.left(kWhole, true, "a:1");
  EXPECT_EQ(take_message<Ready>().state, kWhole);
  member_.receive(Reset{5, "again"});
  EXPECT_EQ(take_message<Ready>().state, kWhole);
}

TEST_F(MemberTest, AFailureIsReportedOnceAndLeftOnlyWhenToldTo) {
  run(3);
  member_.failed(1, "silent");
  EXPECT_EQ(take_message<Failed>(), (Failed{.generation = 3, .accused = 1, .cause = "silent"}));
  member_.failed(1, "again");
  member_.at_end();
  expect_nothing();
  EXPECT_EQ(member_.phase(), Member::Phase::kFailed);
  EXPECT_EQ(member_.begin_commit(), Verdict::kStop);
  member_.receive(Reset{4, "worker 1 is lost"});
  take<Leave>();
  EXPECT_EQ(member_.phase(), Member::Phase::kLeaving);
}

TEST_F(MemberTest, AChangeStopsAtItsCommit) {
  run(3);
  EXPECT_EQ(member_.begin_commit(), Verdict::kGoOn);  // 5
  member_.receive(Prepare{.change = 1, .generation = 3});
  EXPECT_EQ(take_message<Begun>(), (Begun{.change = 1, .commit = 5}));
  EXPECT_EQ(member_.begin_commit(), Verdict::kWait);  // 6
  EXPECT_EQ(member_.may_commit(), Verdict::kWait);
  member_.receive(Target{.change = 1, .commit = 7, .next = 4, .leaving = {2, 9}});
  take<Wake>();
  EXPECT_EQ(member_.may_commit(), Verdict::kGoOn);
  EXPECT_THAT(member_.leaving(), IsEmpty());
  EXPECT_EQ(member_.begin_commit(), Verdict::kStop);  // 7
  EXPECT_THAT(member_.leaving(), ElementsAre(1)) << "worker 9 is no rank";
  EXPECT_EQ(member_.phase(), Member::Phase::kLeaving);
  member_.left(kWhole, true, "a:1");
  EXPECT_EQ(take_message<Ready>().generation, 4u);
  enter(4);
  EXPECT_EQ(member_.begin_commit(), Verdict::kGoOn) << "the change is over";
}

TEST_F(MemberTest, AResetReleasesACommitThatWaits) {
  run(3);
  member_.receive(Prepare{.change = 1, .generation = 3});
  take_message<Begun>();
  EXPECT_EQ(member_.begin_commit(), Verdict::kWait);
  member_.receive(Reset{4, "worker 1 is lost"});
  take<Leave>();
  EXPECT_EQ(member_.may_commit(), Verdict::kStop);
}

TEST_F(MemberTest, TheEndIsReachedTogether) {
  run(3);
  member_.at_end();
  EXPECT_EQ(take_message<AtEnd>(), AtEnd{3});
  member_.receive(Reset{4, "worker 1 is lost"});
  take<Leave>();
  member_.left(kWhole, true, "a:1");
  take_message<Ready>();
  enter(4);
  member_.at_end();
  EXPECT_EQ(take_message<AtEnd>(), AtEnd{4});
  member_.receive(End{});
  take<Finish>();
  member_.disconnected();
  member_.receive(Ping{});
  expect_nothing();
}

TEST_F(MemberTest, AnswersPingsAndEndsWithItsCoordinator) {
  member_.join();
  take_message<Join>();
  member_.receive(Ping{});
  take_message<Pong>();
  member_.disconnected();
  EXPECT_EQ(take<Exit>().cause, "the connection to hvdrun has ended");
}

TEST_F(MemberTest, ARefusedWorkerEnds) {
  member_.join();
  take_message<Join>();
  member_.receive(Refused{"another program"});
  EXPECT_EQ(take<Exit>().cause, "another program");
}

}  // namespace
}  // namespace hvd::member
