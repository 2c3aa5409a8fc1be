#include "engine/operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Rank 1 of two.
class OperationTableTest : public ::testing::Test {
 protected:
  static Submission named(std::string name, int process_set = 0) {
    Submission submission;
    submission.name = std::move(name);
    submission.parameters = Allreduce{};
    submission.input = submission.output = {
        .data = reinterpret_cast<std::byte*>(memory_.data()), .count = 4, .shape = {4}};
    submission.process_set = process_set;
    return submission;
  }
  /// Returns the operations that the engine gets, in order.
  std::vector<OperationPtr> submit(const std::vector<Submission>& submissions) {
    std::vector<Operation> handles(submissions.size());
    table_.submit(submissions, handles, {}, {});
    std::vector<OperationPtr> taken;
    queue_.pop_all(taken, SubmissionQueue::Callbacks::kAll);
    return taken;
  }
  OperationPtr submit(const Submission& submission) {
    return submit(std::vector{submission}).at(0);
  }
  void end(const OperationPtr& operation, const Status& status = {}) {
    table_.release(*operation);
    operation->finish(status, nullptr);
  }
  std::string refused(const std::vector<Submission>& submissions) {
    try {
      submit(submissions);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }

  static inline std::array<float, 4> memory_ = {};
  SubmissionQueue queue_{control::ProcessSetTable(2)};
  OperationTable table_{queue_, 1, std::nullopt};
};

TEST_F(OperationTableTest, ANameIsTakenUntilItsOperationHasEnded) {
  const OperationPtr first = submit(named("a"));
  EXPECT_THAT(refused({named("a")}), HasSubstr("'a' on rank 1: this name is already in flight"));
  const OperationPtr other = submit(named("b"));
  end(first);
  EXPECT_EQ(submit(named("a"))->request.name, "a");
  EXPECT_NE(refused({named("b")}), "accepted");
}

TEST_F(OperationTableTest, EachProcessSetHasItsOwnNames) {
  control::ProcessSetTable sets(2);
  const int set = sets.add({0, 1});
  queue_.set_process_sets(sets);
  submit(named("a"));
  EXPECT_EQ(submit(named("a", set))->request.process_set, set);
  EXPECT_NE(refused({named("a", set)}), "accepted");
}

TEST_F(OperationTableTest, ARankMakesOneSetOfANameAtATimeWithTheOtherMembers) {
  const auto add = [](std::string name, std::vector<int> ranks) {
    return Submission{.name = std::move(name),
                      .parameters = AddProcessSet{std::move(ranks), /*by_members=*/true}};
  };
  const OperationPtr first = submit(add("x", {0, 1}));
  EXPECT_THAT(refused({add("x", {1})}),
              HasSubstr("'x [1]' on rank 1: this rank is making another process set"));
  const OperationPtr unnamed = submit(add("", {0, 1}));
  EXPECT_NE(refused({add("", {1})}), "accepted");
  EXPECT_NE(refused({add("y", {1}), add("y", {0, 1})}), "accepted");
  end(submit(add("y", {1})));
  end(submit(add("y", {1})));
  end(first);
  EXPECT_EQ(submit(add("x", {1}))->request.name, "x [1]");
}

TEST_F(OperationTableTest, TheStateOfAnOperationIsUsedAgain) {
  const OperationState* const first = [&] {
    const OperationPtr operation = submit(named("a"));
    end(operation);
    return operation.get();
  }();
  const OperationPtr again = submit(named("a"));
  EXPECT_EQ(again.get(), first);
  EXPECT_FALSE(again->done());
  EXPECT_NE(refused({named("a")}), "accepted");
}

TEST_F(OperationTableTest, AHandleThatIsPassedAgainKeepsItsStateAndOtherHandlesTheirs) {
  const Submission submission = named("a");
  std::vector<Operation> handle(1);
  std::vector<OperationPtr> taken;
  const auto submit_again = [&] {
    table_.submit({&submission, 1}, handle, {}, {});
    taken.clear();
    queue_.pop_all(taken, SubmissionQueue::Callbacks::kAll);
    return taken.at(0);
  };
  const OperationPtr first = submit_again();
  EXPECT_THROW(submit_again(), UsageError) << "it is in flight";
  EXPECT_FALSE(handle[0].valid()) << "a handle is released if the call fails";
  end(first);
  EXPECT_EQ(submit_again().get(), first.get());
  end(first, {StatusCode::kMismatch, "the first use", -1});
  EXPECT_EQ(handle[0].status().message, "the first use");
  EXPECT_EQ(submit_again().get(), first.get()) << "the only handle is the one passed";
  EXPECT_FALSE(handle[0].done());
  end(first, {StatusCode::kMismatch, "the second use", -1});
  const Operation copy = handle[0];
  const OperationPtr other = submit_again();
  EXPECT_NE(other.get(), first.get()) << "another handle reads the state";
  EXPECT_EQ(copy.status().message, "the second use");
  EXPECT_FALSE(handle[0].done());
  end(other);
  const Submission renamed = named("b");
  table_.submit({&renamed, 1}, handle, {}, {});
  EXPECT_FALSE(handle[0].done());
  EXPECT_EQ(submit(std::vector{named("a")}).back().get(), other.get()) << "no handle is left";
}

TEST_F(OperationTableTest, NamesAreForgottenAlthoughTheOldestAreInFlight) {
  constexpr int kMany = 3 << 14;
  std::vector<OperationPtr> in_flight;
  for (int i = 0; i < 8; ++i) in_flight.push_back(submit(named("pending " + std::to_string(i))));
  const OperationPtr first = submit(named("0"));
  end(first);
  for (int name = 1; name < kMany; ++name) end(submit(named(std::to_string(name))));
  EXPECT_NE(submit(named("0")).get(), first.get()) << "the table would grow without limit";
  for (const OperationPtr& pending : in_flight) {
    EXPECT_NE(refused({named(pending->request.name)}), "accepted");
    end(pending);
    EXPECT_EQ(submit(named(pending->request.name)).get(), pending.get());
  }
}

// A program that invents new names in addition to those that it uses in each step.
TEST_F(OperationTableTest, OfTooManyNamesTheLeastRecentlyUsedAreForgotten) {
  constexpr int kMany = 3 << 14;
  const auto use = [this](const std::string& name) {
    const OperationPtr operation = submit(named(name));
    end(operation);
    return operation;
  };
  const OperationPtr steady = use("steady");
  const OperationPtr first = use("0");
  for (int name = 1; name < kMany; ++name) {
    use(std::to_string(name));
    if (name % 1000 != 0) continue;
    ASSERT_EQ(use("steady").get(), steady.get()) << "after " << name;
  }
  EXPECT_NE(use("0").get(), first.get()) << "the table would grow without limit";
  const OperationPtr last = use("last");
  EXPECT_EQ(use("last").get(), last.get()) << "the one that was just released is remembered";
}

TEST_F(OperationTableTest, AStateIsNotUsedAgainForAnotherOperationOrWhileAHandleIsLeft) {
  OperationPtr operation = submit(named("a"));
  end(operation);
  Submission larger = named("a");
  larger.parameters = Allreduce{.op = ReduceOp::kMax};
  OperationPtr changed = submit(larger);
  EXPECT_NE(changed.get(), operation.get());
  end(changed);

  Operation handle;
  table_.submit({&larger, 1}, {&handle, 1}, {}, {});
  std::vector<OperationPtr> taken;
  queue_.pop_all(taken, SubmissionQueue::Callbacks::kAll);
  ASSERT_EQ(taken.at(0).get(), changed.get());
  end(changed, {StatusCode::kMismatch, "the handle says so", -1});
  EXPECT_NE(submit(larger).get(), changed.get());
  EXPECT_EQ(handle.status().message, "the handle says so");
}

TEST_F(OperationTableTest, UnnamedOperationsAreNumberedBySetAndKind) {
  control::ProcessSetTable sets(2);
  const int set = sets.add({0, 1});
  queue_.set_process_sets(sets);
  Submission reducescatter = named("");
  reducescatter.parameters = Reducescatter{};
  std::array<float, 2> rows = {};
  reducescatter.output = {
      .data = reinterpret_cast<std::byte*>(rows.data()), .count = 2, .shape = {2}};
  const auto operations = submit({named(""), reducescatter, named(""), named("", set), named("x")});
  std::vector<std::uint64_t> ordinals;
  for (const OperationPtr& operation : operations) ordinals.push_back(operation->request.ordinal);
  EXPECT_THAT(ordinals, ElementsAre(0, 0, 1, 0, 0));
  EXPECT_EQ(submit(named(""))->request.ordinal, 2U);
}

TEST_F(OperationTableTest, OperationsInSequenceAreNumberedBySet) {
  Submission first = named(""), second = named(""), third = named(""), with_name = named("x");
  second.parameters = Broadcast{0};
  for (Submission* const one : {&first, &second, &third, &with_name}) one->in_sequence = true;
  const auto operations = submit({first, named(""), second, with_name, third});
  std::vector<std::string> names;
  for (const OperationPtr& operation : operations) names.push_back(operation->request.name);
  EXPECT_THAT(names,
              ElementsAre("unnamed.0", "allreduce.unnamed.0", "unnamed.1", "x", "unnamed.2"));
  Submission again = named("");
  again.in_sequence = true;
  EXPECT_NE(refused({again, with_name}), "accepted");
  EXPECT_EQ(submit(again)->request.name, "unnamed.3") << "its number was given back";
}

TEST_F(OperationTableTest, AllAreAcceptedOrNone) {
  submit(named("taken"));
  EXPECT_NE(refused({named("a"), named(""), named("taken")}), "accepted");
  EXPECT_THAT(queue_.queued(), IsEmpty());
  EXPECT_EQ(submit(named(""))->request.ordinal, 0U) << "its number was given back";
  EXPECT_EQ(submit(named("a"))->request.name, "a");
  const Submission join{.name = "join", .parameters = Join{}};
  EXPECT_NE(refused({join, named("b")}), "accepted");
  EXPECT_EQ(submit(named("b"))->request.name, "b") << "this rank has not joined";
}

TEST_F(OperationTableTest, AnUnnamedGroupIsOfOneKindAndSetAndComplete) {
  control::ProcessSetTable sets(2);
  const int set = sets.add({0, 1});
  queue_.set_process_sets(sets);
  const auto member = [](int index, int size, OperationParameters parameters = Allreduce{},
                         int process_set = 0) {
    Submission submission = named("", process_set);
    submission.parameters = std::move(parameters);
    submission.group_size = size;
    submission.group_index = index;
    return submission;
  };
  // Both kinds were submitted before, so that each has numbers to use.
  for (const OperationPtr& operation :
       submit({named(""), member(0, 1, Broadcast{}), named("", set)}))
    end(operation);
  const char* const one_kind =
      "rank 1: an unnamed group of 2 begins with allreduce in process set 0, and has ";
  const char* const incomplete =
      "rank 1: an unnamed group of 2 begins with allreduce in process set 0 and is not complete; "
      "submit its members, 0 to 1, in one call and in order";
  EXPECT_THAT(refused({member(0, 2), member(1, 2, Broadcast{})}),
              HasSubstr(std::string(one_kind) + "broadcast in process set 0"));
  EXPECT_THAT(refused({member(0, 2), member(1, 2, Allreduce{}, set)}),
              HasSubstr(std::string(one_kind) + "allreduce in process set 1"));
  for (const auto& submissions : {std::vector{member(0, 2)},
                                  {member(1, 2)},
                                  {member(1, 2), member(0, 2)},
                                  {member(0, 2), member(0, 2), member(1, 2)},
                                  {member(0, 2), named(""), member(1, 2)},
                                  {member(0, 2), named("a"), member(1, 2)},
                                  {named("a"), member(0, 2)},
                                  {member(0, 2), member(1, 3)}})
    EXPECT_THAT(refused(submissions), HasSubstr(incomplete));
  EXPECT_THAT(queue_.queued(), IsEmpty());
  const auto operations = submit({named("a"), member(0, 2), member(1, 2), member(0, 1), named("")});
  std::vector<std::uint64_t> ordinals;
  for (const OperationPtr& operation : operations) ordinals.push_back(operation->request.ordinal);
  EXPECT_THAT(ordinals, ElementsAre(0, 1, 2, 3, 4)) << "refused calls take no numbers";
}

TEST_F(OperationTableTest, AJoinEndsAllSubmissionsUntilItHasEnded) {
  end(submit(named("")));
  const OperationPtr join = submit(Submission{.name = "join", .parameters = Join{}});
  EXPECT_THAT(refused({named("a")}), HasSubstr("this rank has called join()"));
  join->set_result(0);
  end(join);
  EXPECT_EQ(submit(named(""))->request.ordinal, 1'000'000'000U)
      << "ranks that made other numbers of calls count alike again";
}

TEST_F(OperationTableTest, AfterAJoinThatFailedNumbersGoOn) {
  end(submit(named("")));
  end(submit(Submission{.name = "join", .parameters = Join{}}), {StatusCode::kShutdown, "", 0});
  EXPECT_EQ(submit(named(""))->request.ordinal, 1U);
}

TEST_F(OperationTableTest, CountsOperationsThatCallBack) {
  Submission calling = named("a");
  calling.on_done = [](const Status&, const EventPtr&) {};
  EXPECT_FALSE(table_.calls_back());
  const OperationPtr operation = submit(calling);
  const OperationPtr silent = submit(named("b"));
  EXPECT_TRUE(table_.calls_back());
  end(silent);
  EXPECT_TRUE(table_.calls_back());
  end(operation);
  EXPECT_FALSE(table_.calls_back());
}

TEST_F(OperationTableTest, SubmissionsAreRefusedAfterShutdownOrAFailure) {
  queue_.request_shutdown();
  EXPECT_THROW(submit(named("a")), ShutdownError);
  queue_.set_failed({StatusCode::kPeerLost, "rank 0 is gone", 0});
  EXPECT_THROW(submit(named("a")), PeerLostError);
}

}  // namespace
}  // namespace hvd::runtime
