// The steady state of ranks that share one thread, with real executors between them.
#include "engine/steady_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "hvd/error.h"
#include "support/batches.h"
#include "support/local_backend.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using runtime::Executor;
using runtime::OperationPtr;
using runtime::OperationState;
using runtime::RuntimeOptions;
using runtime::SteadyState;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

wire::Request request(const std::string& name) {
  wire::Request asked = float_request(name, 4);
  asked.op = ReduceOp::kSum;
  return asked;
}

wire::Request unnamed(std::uint64_t ordinal) {
  wire::Request asked = request(wire::unnamed_name(OpKind::kAllreduce, ordinal));
  asked.unnamed = true;
  asked.ordinal = ordinal;
  return asked;
}

/// A rank with the parts of an engine except those that negotiate.
struct Rank {
  Rank(const RuntimeOptions& options, std::unique_ptr<control::ControlPlane> plane,
       const std::shared_ptr<LocalWorld>& world, const Clock& clock)
      : control(std::move(plane)),
        executor({control->topology(), clock, counters, timeline},
                 runtime::make_queue_factory({control->topology(), *control},
                                             {std::make_shared<LocalBackend>(world)}, std::nullopt),
                 [this](const OperationPtr& operation, const Status& status, const EventPtr& ready,
                        bool) {
                   ended.push_back(operation->request.name);
                   operation->finish(status, ready);
                 }),
        steady(options, *control, executor, counters) {}

  std::uint64_t sent() const { return counters.control_messages_sent.load(); }
  std::vector<wire::ReplayUpdate> received() {
    std::vector<wire::ReplayUpdate> updates;
    while (const auto message = control->poll())
      updates.push_back(std::get<wire::ReplayUpdate>(wire::decode(message->bytes)));
    return updates;
  }

  observe::Counters counters;
  runtime::CurrentTimeline timeline;
  std::unique_ptr<control::ControlPlane> control;
  std::vector<std::string> ended;
  Executor executor;
  SteadyState steady;
};

class SteadyStateTest : public ::testing::Test {
 protected:
  using Outcome = SteadyState::Outcome;

  void make(std::vector<std::string> hosts) {
    const int size = static_cast<int>(hosts.size());
    network_ = LocalNetwork::create({.size = size, .host_per_rank = std::move(hosts)}, clock_);
    const auto world = std::make_shared<LocalWorld>(size);
    for (int rank = 0; rank < size; ++rank)
      ranks_.push_back(std::make_unique<Rank>(options_, network_->plane(rank), world, clock_));
    data_.resize(static_cast<std::size_t>(size));
  }
  SteadyState& steady(std::size_t rank) { return ranks_[rank]->steady; }
  void begin(const std::vector<std::vector<wire::Request>>& schedule) {
    for (const auto& rank : ranks_) {
      std::vector<control::AgreedBundle> bundles;
      for (const auto& requests : schedule)
        bundles.push_back({agreed_batch(requests, static_cast<int>(ranks_.size()))});
      rank->steady.begin(std::move(bundles), clock_.now());
    }
  }
  OperationPtr make_operation(std::size_t rank, const wire::Request& asked) {
    std::vector<float>& memory = data_[rank][asked.name];
    memory.assign(4, static_cast<float>(rank + 1));
    Submission submission;
    submission.name = asked.name;
    submission.parameters = Allreduce{.op = asked.op};
    submission.input = {
        reinterpret_cast<std::byte*>(memory.data()), 4, DataType::kFloat32, {}, {4}};
    submission.output = submission.input;
    return OperationPtr(new OperationState(submission, asked, {}, clock_.now()));
  }
  bool offer(std::size_t rank, const wire::Request& asked) {
    OperationPtr operation = make_operation(rank, asked);
    return steady(rank).offer(operation, clock_.now());
  }
  bool offer(std::size_t rank, const std::string& name) { return offer(rank, request(name)); }
  Outcome advance(std::size_t rank) { return steady(rank).advance(clock_.now(), false); }
  void execute() {
    for (int round = 0; round < 4; ++round) {
      for (const auto& rank : ranks_) rank->executor.progress();
    }
  }
  std::vector<std::string> taken(std::size_t rank) {
    std::vector<std::string> names;
    for (const OperationPtr& one : steady(rank).release_waiting())
      names.push_back(one->request.name);
    return names;
  }
  bool rung(std::size_t rank, std::uint32_t since) {
    return ranks_[rank]->control->doorbell().ticket() != since;
  }
  std::uint32_t ticket(std::size_t rank) { return ranks_[rank]->control->doorbell().ticket(); }

  VirtualClock clock_;
  RuntimeOptions options_;
  std::shared_ptr<LocalNetwork> network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::map<std::string, std::vector<float>>> data_;
};

wire::Plan plan(std::uint64_t sequence) {
  wire::Plan made;
  made.sequence = sequence;
  return made;
}

TEST_F(SteadyStateTest, ABatchRunsWhenEveryRankHasAllOfIt) {
  make({"a", "a"});
  EXPECT_FALSE(steady(0).repeating());
  begin({{request("x"), request("y")}, {request("z")}});
  EXPECT_TRUE(steady(0).repeating());
  EXPECT_EQ(steady(0).batches(), 2U);
  for (int step = 1; step < 4; ++step) {
    EXPECT_TRUE(offer(0, "x"));
    EXPECT_TRUE(offer(0, "y"));
    EXPECT_TRUE(offer(0, "z"));
    EXPECT_EQ(advance(0), Outcome::kNothing);
    EXPECT_TRUE(steady(0).anything_waits());
    EXPECT_TRUE(offer(1, "x"));
    EXPECT_EQ(advance(1), Outcome::kNothing);
    EXPECT_TRUE(offer(1, "y"));
    const std::uint32_t before = ticket(0);
    EXPECT_EQ(advance(1), Outcome::kRun);
    EXPECT_TRUE(rung(0, before)) << "it may sleep, and has an operation to run";
    EXPECT_FALSE(steady(1).anything_waits());
    EXPECT_EQ(advance(0), Outcome::kRun);
    EXPECT_TRUE(steady(0).anything_waits()) << "z waits for rank 1";
    EXPECT_TRUE(offer(1, "z"));
    EXPECT_EQ(advance(1), Outcome::kRun);
    EXPECT_EQ(advance(0), Outcome::kRun);
    EXPECT_FALSE(steady(0).anything_waits());
    execute();
    EXPECT_THAT(ranks_[0]->ended, ElementsAre("x", "y", "z"));
    EXPECT_THAT(ranks_[1]->ended, ElementsAre("x", "y", "z"));
    for (const char* const name : {"x", "y", "z"})
      EXPECT_THAT(data_[1][name], ElementsAre(3, 3, 3, 3)) << name;
    EXPECT_EQ(ranks_[0]->counters.locked_operations.load(), static_cast<std::uint64_t>(3 * step));
    ranks_[0]->ended.clear();
    ranks_[1]->ended.clear();
  }
  EXPECT_EQ(steady(0).batches_run(), 6U);
}

// All ranks are on the same host.
TEST_F(SteadyStateTest, ARankRingsAFewOthersAndTogetherTheyWakeTheHost) {
  constexpr std::size_t kRanks = 30;
  std::vector<std::string> hosts(kRanks, "a");
  make(hosts);
  begin({{request("x")}});
  const auto tickets = [&] {
    std::vector<std::uint32_t> all;
    for (std::size_t rank = 0; rank < kRanks; ++rank) all.push_back(ticket(rank));
    return all;
  };
  for (const bool leaves : {false, true}) {
    const std::size_t last = 17;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (rank == last) continue;
      EXPECT_TRUE(offer(rank, "x"));
      EXPECT_EQ(advance(rank), Outcome::kNothing);
    }
    leaves ? steady(last).leave_soon() : static_cast<void>(offer(last, "x"));
    const Outcome expected = leaves ? Outcome::kLeft : Outcome::kRun;
    std::vector<std::size_t> awake = {last};
    std::vector<bool> done(kRanks);
    std::size_t count = 0;
    int waves = 0;
    for (; !awake.empty(); ++waves) {
      std::vector<std::size_t> woken;
      for (const std::size_t rank : awake) {
        if (done[rank]) continue;
        done[rank] = true;
        ++count;
        const std::vector<std::uint32_t> before = tickets();
        EXPECT_EQ(advance(rank), expected);
        std::uint32_t rings = 0;
        for (std::size_t other = 0; other < kRanks; ++other) {
          rings += ticket(other) - before[other];
          if (rung(other, before[other])) woken.push_back(other);
        }
        EXPECT_LE(rings, 9U) << "rank " << rank;
      }
      awake = std::move(woken);
    }
    EXPECT_EQ(count, kRanks) << "all have been woken";
    EXPECT_LE(waves, 5);
    execute();
  }
}

TEST_F(SteadyStateTest, OtherHostsAreNotRung) {
  make({"a", "a", "b", "b"});
  begin({{request("x")}});
  EXPECT_TRUE(offer(0, "x"));
  EXPECT_EQ(advance(0), Outcome::kNothing);
  const std::uint32_t first = ticket(0), elsewhere = ticket(2);
  EXPECT_TRUE(offer(1, "x"));
  EXPECT_EQ(advance(1), Outcome::kNothing);
  EXPECT_TRUE(rung(0, first)) << "it notifies the other host";
  EXPECT_FALSE(rung(2, elsewhere));
}

TEST_F(SteadyStateTest, ALaunchOnAGpuAwaitsOtherHosts) {
  const auto waits_after_offer = [&](std::vector<std::string> hosts, bool on_device) {
    ranks_.clear();
    make(std::move(hosts));
    wire::Request asked = request("x");
    if (on_device) asked.kind = OpKind::kBarrier;  // of the GPU's memory, without a channel
    asked.device = on_device ? DeviceType::kCuda : DeviceType::kCpu;
    begin({{asked}});
    EXPECT_FALSE(steady(0).launch_awaits_other_hosts()) << "no operation waits yet";
    EXPECT_TRUE(offer(0, asked));
    return steady(0).launch_awaits_other_hosts();
  };
  EXPECT_TRUE(waits_after_offer({"a", "b"}, true));
  EXPECT_FALSE(waits_after_offer({"a", "a"}, true)) << "ranks of one host ring";
  EXPECT_FALSE(waits_after_offer({"a", "b"}, false));
}

TEST_F(SteadyStateTest, WaitingOperationsAreReturnedAfterLeavingAndRunningOnesAreNot) {
  make({"a", "a"});
  begin({{request("x")}, {request("y"), request("z")}});
  for (const std::size_t rank : {0, 1}) EXPECT_TRUE(offer(rank, "x"));
  for (const std::size_t rank : {0, 1, 0}) advance(rank);
  EXPECT_TRUE(offer(0, "z"));
  EXPECT_FALSE(offer(1, "something else"));
  EXPECT_TRUE(offer(1, "y"));
  EXPECT_EQ(advance(1), Outcome::kLeft);
  EXPECT_FALSE(steady(1).repeating());
  EXPECT_EQ(steady(1).batches_run(), 1U);
  EXPECT_THAT(taken(1), ElementsAre("y"));
  EXPECT_FALSE(steady(1).anything_waits());
  EXPECT_THAT(taken(1), IsEmpty());
  EXPECT_EQ(advance(0), Outcome::kLeft) << "no rank can run the batch at which rank 1 has left";
  EXPECT_EQ(steady(0).waiting().size(), 1U);
  EXPECT_THAT(taken(0), ElementsAre("z"));
  execute();
  EXPECT_THAT(ranks_[0]->ended, ElementsAre("x"));
  begin({{request("x")}});
  EXPECT_EQ(advance(0), Outcome::kNothing) << "no operation is left over from before";
}

TEST_F(SteadyStateTest, OnOneHostAPlanCannotArriveDuringAReplay) {
  make({"a", "a"});
  begin({{request("x")}});
  EXPECT_THROW(steady(0).defer(plan(7)), Error);
  EXPECT_FALSE(steady(0).next_deferred_plan().has_value());
}

TEST_F(SteadyStateTest, PlansWaitUntilItIsLeftAndWhileTheNextIsRepeated) {
  make({"a", "b"});
  begin({{request("x")}});
  for (const std::uint64_t sequence : {7, 8, 9}) steady(1).defer(plan(sequence));
  EXPECT_FALSE(steady(1).next_deferred_plan().has_value());
  steady(1).leave_soon();
  EXPECT_EQ(advance(1), Outcome::kLeft);
  EXPECT_EQ(steady(1).next_deferred_plan()->sequence, 7U);
  EXPECT_EQ(steady(1).next_deferred_plan()->sequence, 8U);
  steady(1).release_waiting();
  steady(1).begin({{agreed_batch({request("x")}, 2)}}, clock_.now());
  EXPECT_FALSE(steady(1).next_deferred_plan().has_value()) << "plan 8 has begun a schedule";
  steady(1).leave_soon();
  EXPECT_EQ(advance(1), Outcome::kLeft);
  EXPECT_EQ(steady(1).next_deferred_plan()->sequence, 9U);
  EXPECT_FALSE(steady(1).next_deferred_plan().has_value());
}

TEST_F(SteadyStateTest, TheFirstRankOfEachHostNotifiesTheOtherHosts) {
  make({"a", "a", "b"});
  begin({{request("x")}});
  EXPECT_FALSE(steady(0).exchange_updates()) << "nothing has happened";
  for (std::size_t rank : {0, 1}) {
    EXPECT_TRUE(offer(rank, "x"));
    EXPECT_EQ(advance(rank), Outcome::kNothing);
  }
  EXPECT_FALSE(steady(0).exchange_updates()) << "the other host has sent no update";
  EXPECT_FALSE(steady(1).exchange_updates());
  EXPECT_EQ(ranks_[0]->sent(), 1U);
  EXPECT_EQ(ranks_[1]->sent(), 0U) << "it is not the first rank of its host";
  EXPECT_TRUE(offer(2, "x"));
  EXPECT_EQ(advance(2), Outcome::kNothing);
  EXPECT_FALSE(steady(2).exchange_updates());
  for (const wire::ReplayUpdate& update : ranks_[2]->received()) steady(2).accept(0, update);
  EXPECT_TRUE(steady(2).exchange_updates());
  EXPECT_EQ(advance(2), Outcome::kRun);
  EXPECT_EQ(advance(1), Outcome::kNothing) << "its host has got no update of the other one";
  const std::vector<wire::ReplayUpdate> updates = ranks_[0]->received();
  ASSERT_EQ(updates.size(), 1U);
  steady(0).accept(2, updates.front());
  const std::uint32_t before = ticket(1);
  EXPECT_TRUE(steady(0).exchange_updates());
  EXPECT_TRUE(rung(1, before)) << "the ranks of this host have something to do";
  EXPECT_EQ(advance(0), Outcome::kRun);
  EXPECT_EQ(advance(1), Outcome::kRun);
  EXPECT_FALSE(steady(0).exchange_updates()) << "no update is sent twice";
  EXPECT_EQ(ranks_[0]->sent(), 1U);
}

TEST_F(SteadyStateTest, AWishFromAnotherHostRingsTheRanksOfThisOne) {
  make({"a", "a", "b"});
  begin({{request("x")}});
  const std::uint32_t before = ticket(1);
  steady(0).accept(2, {.position = 1, .requests_leave = true});
  EXPECT_TRUE(rung(1, before));
  EXPECT_EQ(advance(1), Outcome::kLeft);
}

TEST_F(SteadyStateTest, NewsForARankThatDoesNotSpeakForItsHostAreAnError) {
  make({"a", "a", "b"});
  try {
    steady(1).accept(2, {.position = 1});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 2 sent a replay update to rank 1"));
  }
}

TEST_F(SteadyStateTest, AnUnnamedOperationWhosePlaceStillRunsEndsTheReplay) {
  make({"a", "a"});
  begin({{unnamed(0)}});
  for (const std::size_t rank : {0, 1}) EXPECT_TRUE(offer(rank, unnamed(1)));
  EXPECT_EQ(advance(0), Outcome::kNothing);
  EXPECT_EQ(advance(1), Outcome::kRun);
  EXPECT_FALSE(offer(1, unnamed(2))) << "the last one has not ended";
  EXPECT_EQ(advance(1), Outcome::kLeft);
}

TEST_F(SteadyStateTest, ABlockedRankThatLacksAnOperationLeaves) {
  make({"a", "a"});
  begin({{request("x"), request("y")}});
  EXPECT_TRUE(offer(0, "x"));
  EXPECT_EQ(advance(0), Outcome::kNothing);
  EXPECT_TRUE(steady(0).leave_if_own_missing());
  EXPECT_EQ(advance(0), Outcome::kLeft);
  for (const std::string name : {"x", "y"}) EXPECT_TRUE(offer(1, name));
  EXPECT_EQ(advance(1), Outcome::kLeft);
  EXPECT_FALSE(steady(1).leave_if_own_missing()) << "no schedule is being repeated";
}

TEST_F(SteadyStateTest, ARankWithAllOperationsRequestsTheOthersToLeaveAfterSomeTime) {
  make({"a", "a"});
  begin({{request("x")}});
  EXPECT_TRUE(offer(0, "x"));
  EXPECT_EQ(advance(0), Outcome::kNothing);
  EXPECT_FALSE(steady(0).leave_if_own_missing()) << "the others may be about to arrive";
  ASSERT_TRUE(steady(0).deadline().has_value());
  EXPECT_EQ(*steady(0).deadline(), clock_.now() + seconds(1));
  const std::uint32_t before = ticket(1);
  clock_.advance(seconds(1) - milliseconds(1));
  EXPECT_FALSE(steady(0).watch(clock_.now(), true));
  clock_.advance(milliseconds(1));
  EXPECT_FALSE(steady(0).watch(clock_.now(), false)) << "no operation waits here";
  EXPECT_EQ(advance(1), Outcome::kNothing) << "no rank has received a request to leave";
  EXPECT_FALSE(rung(1, before));
  EXPECT_FALSE(steady(0).watch(clock_.now(), true)) << "this rank is not the one that leaves";
  EXPECT_TRUE(rung(1, before));
  EXPECT_EQ(*steady(0).deadline(), clock_.now() + seconds(1)) << "and it goes on waiting";
  EXPECT_EQ(advance(1), Outcome::kLeft);
  EXPECT_EQ(advance(0), Outcome::kLeft);
  EXPECT_FALSE(steady(0).deadline().has_value());
  EXPECT_FALSE(steady(0).watch(clock_.now() + seconds(9), true));
}

TEST_F(SteadyStateTest, ARankWithSomeOperationsLeavesAfterSomeTime) {
  options_.stall_warning = seconds(2);
  make({"a", "a"});
  begin({{request("x"), request("y")}});
  clock_.advance(milliseconds(150));
  EXPECT_TRUE(offer(0, "x"));
  EXPECT_EQ(advance(0), Outcome::kNothing);
  clock_.advance(milliseconds(199));
  EXPECT_FALSE(steady(0).watch(clock_.now(), true))
      << "an operation was submitted after the watch began";
  clock_.advance(milliseconds(1));
  EXPECT_TRUE(steady(0).watch(clock_.now(), true)) << "a tenth of the stall warning";
  EXPECT_EQ(advance(0), Outcome::kLeft);
}

TEST_F(SteadyStateTest, SwitchedOffNoScheduleIsReplayed) {
  options_.schedule_lock = false;
  make({"a", "b"});
  EXPECT_FALSE(steady(0).available());
  EXPECT_FALSE(steady(0).exchange_updates());
  EXPECT_EQ(advance(0), Outcome::kNothing);
}

}  // namespace
}  // namespace hvd::testing
