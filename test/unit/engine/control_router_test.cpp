// Tests the transfer of reports and plans between ranks that share one thread, without engines.
#include "engine/control_router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "support/fake_carrier.h"
#include "support/join_nodes.h"
#include "support/local_job.h"
#include "transport/control_plane.h"

namespace hvd::testing {
namespace {

using runtime::ControlRouter;
using runtime::PeerWatch;
using runtime::RuntimeOptions;
using runtime::StepTime;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

wire::Request asked(const std::string& name) {
  wire::Request request;
  request.name = name;
  request.shape = {4};
  return request;
}

/// A rank with the negotiating parts of an engine, without operations.
struct Node {
  Node(const RuntimeOptions& options, std::unique_ptr<control::ControlPlane> plane,
       VirtualClock& virtual_clock)
      : clock(virtual_clock),
        control(std::move(plane)),
        time(clock, options.peer_timeout / 4),
        negotiator(control->rank(), control::ProcessSetTable(control->size()), 1024),
        watch(options, *control, counters, time),
        route(options, {*control, counters, time, watch, negotiator}, false) {}

  std::uint64_t sent() const { return counters.control_messages_sent.load(); }
  std::uint64_t received() const { return counters.control_messages_received.load(); }
  void submit(const std::string& name) {
    negotiator.submit(asked(name));
    route.report(*negotiator.next_report());
  }
  void apply(const wire::Plan& plan) {
    route.pass_down(plan);
    negotiator.apply(plan);
    route.on_applied(plan);
  }
  /// Receives the messages that have arrived, and applies plans. @return the plans' numbers
  std::vector<std::uint64_t> receive() {
    std::vector<std::uint64_t> plans;
    clock.advance(microseconds(1));  // messages that one rank sends at once arrive one by one
    while (auto received = route.receive()) {
      const auto* plan = std::get_if<wire::Plan>(&received->payload);
      if (plan == nullptr) continue;
      apply(*plan);
      plans.push_back(plan->sequence);
    }
    return plans;
  }

  VirtualClock& clock;
  observe::Counters counters;
  std::unique_ptr<control::ControlPlane> control;
  StepTime time;
  control::Negotiator negotiator;
  PeerWatch watch;
  ControlRouter route;
};

class ControlRouterTest : public ::testing::Test {
 protected:
  void make(std::vector<std::string> hosts, bool rings = true) {
    const int size = static_cast<int>(hosts.size());
    network_ = LocalNetwork::create(
        {.size = size, .host_per_rank = std::move(hosts), .rings_across_hosts = rings}, clock_);
    for (int rank = 0; rank < size; ++rank)
      nodes_.push_back(std::make_unique<Node>(options_, network_->plane(rank), clock_));
  }
  /// Eight hosts of one rank, where each rank has at most two children: 0 - 1 2, 1 - 3 4, ...
  void make_tree() {
    options_.control_radix = 2;
    make({"a", "b", "c", "d", "e", "f", "g", "h"});
  }
  Node& node(std::size_t rank) { return *nodes_[rank]; }
  ControlRouter& route(std::size_t rank) { return node(rank).route; }
  void give(std::size_t from, int to, const wire::Bytes& bytes) {
    node(from).control->send(to, bytes);
    clock_.advance(
        milliseconds(1));  // messages of different senders arrive in the order of sending
  }
  /// The messages that have arrived at a rank and that it has not received yet.
  std::vector<wire::AnyMessage> mail(std::size_t rank) {
    std::vector<wire::AnyMessage> messages;
    clock_.advance(microseconds(1));
    while (const auto message = node(rank).control->poll())
      messages.push_back(wire::decode(message->bytes));
    return messages;
  }
  void begin_step() {
    for (const auto& node : nodes_) node->time.begin_step();
  }
  std::string error_of(std::size_t rank) {
    try {
      while (route(rank).receive()) {
      }
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  VirtualClock clock_;
  RuntimeOptions options_;
  std::shared_ptr<LocalNetwork> network_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

TEST_F(ControlRouterTest, NeighboursAreThoseOfTheTreeOrAllAndRankZero) {
  make_tree();
  EXPECT_THAT(route(0).neighbours(), ElementsAre(1, 2));
  EXPECT_THAT(route(1).neighbours(), ElementsAre(3, 4, 0));
  EXPECT_THAT(route(7).neighbours(), ElementsAre(3));
}

TEST_F(ControlRouterTest, NeighboursWithoutATreeAreAllOfRankZero) {
  make({"a", "a", "b"});
  EXPECT_THAT(route(0).neighbours(), ElementsAre(1, 2));
  EXPECT_THAT(route(2).neighbours(), ElementsAre(0));
}

TEST_F(ControlRouterTest, WithoutATreeEachRankReportsToRankZeroAndReceivesItsPlan) {
  make({"a", "a", "a"});
  EXPECT_TRUE(route(0).coordinates());
  EXPECT_FALSE(route(1).coordinates());
  for (std::uint64_t round = 1; round < 3; ++round) {
    for (const std::size_t rank : {0, 1}) node(rank).submit("x");
    EXPECT_THAT(node(0).receive(), IsEmpty());
    EXPECT_TRUE(route(0).waiting());
    EXPECT_FALSE(route(0).decide({})) << "rank 2 has not submitted it";
    node(2).submit("x");
    EXPECT_THAT(node(0).receive(), IsEmpty());
    EXPECT_TRUE(route(0).decide({}));
    EXPECT_FALSE(route(0).decide({}));
    clock_.advance(milliseconds(1));
    for (const std::size_t rank : {0, 1, 2}) {
      EXPECT_FALSE(route(rank).quiet());
      EXPECT_THAT(node(rank).receive(), ElementsAre(round));
      EXPECT_TRUE(route(rank).quiet());
      EXPECT_FALSE(route(rank).forward_reports());
      EXPECT_EQ(route(rank).last_plan_at(), clock_.now());
      EXPECT_EQ(node(rank).counters.plans_applied.load(), round);
    }
    EXPECT_FALSE(route(1).decide({}));
    // A rank's message to itself counts.
    EXPECT_EQ(node(0).sent(), round * (1 + 3));
    EXPECT_EQ(node(0).received(), round * (3 + 1));
    EXPECT_EQ(node(1).sent(), round);
    EXPECT_EQ(node(1).received(), round);
    EXPECT_EQ(node(2).counters.negotiated_operations.load(), round);
    EXPECT_EQ(node(2).counters.cached_operations.load(), round - 1);
  }
  EXPECT_FALSE(route(0).waiting());
}

TEST_F(ControlRouterTest, RankZerosOwnReportAndPlanAreNoMessages) {
  make({"a", "a"});
  node(0).submit("x");
  EXPECT_EQ(node(0).counters.control_bytes_sent.load(), 0U);
  EXPECT_TRUE(mail(0).empty());
  node(1).submit("x");
  node(0).receive();
  EXPECT_FALSE(route(0).has_own_plan());
  EXPECT_TRUE(route(0).decide({}));
  EXPECT_TRUE(mail(0).empty());
  EXPECT_TRUE(route(0).has_own_plan());
  EXPECT_FALSE(route(0).quiet());
  const std::uint64_t bytes = node(0).counters.control_bytes_sent.load();
  const auto sent = mail(1);
  ASSERT_EQ(sent.size(), 1U);
  EXPECT_EQ(bytes, wire::encode(std::get<wire::Plan>(sent[0])).size()) << "to one other rank";
  // Rank 0 receives its own plan before messages of other ranks.
  give(1, 0, wire::encode(wire::ReplayUpdate{}));
  const auto own = route(0).receive();
  ASSERT_TRUE(own && std::holds_alternative<wire::Plan>(own->payload));
  EXPECT_EQ(std::get<wire::Plan>(own->payload), std::get<wire::Plan>(sent[0]));
  EXPECT_EQ(own->source, 0);
  EXPECT_FALSE(route(0).has_own_plan());
  const auto next = route(0).receive();
  ASSERT_TRUE(next && std::holds_alternative<wire::ReplayUpdate>(next->payload));
  EXPECT_TRUE(route(0).quiet());
}

TEST_F(ControlRouterTest, ARankAloneSendsNoMessage) {
  make({"a"});
  node(0).submit("x");
  EXPECT_TRUE(route(0).decide({}));
  EXPECT_FALSE(route(0).decide({})) << "and the plan is still there";
  EXPECT_EQ(node(0).counters.control_bytes_sent.load(), 0U);
  EXPECT_EQ(node(0).sent(), 2U) << "its messages to itself count";
  EXPECT_THAT(node(0).receive(), ElementsAre(1U));
  EXPECT_FALSE(route(0).decide({}));
  node(0).submit("x");
  EXPECT_TRUE(route(0).decide({}));
  route(0).drop_own_plan();
  EXPECT_THAT(node(0).receive(), IsEmpty());
}

TEST_F(ControlRouterTest, ATreeMergesOnTheWayUpAndFansOutOnTheWayDown) {
  make_tree();
  for (const auto& node : nodes_) node->submit("x");
  EXPECT_TRUE(route(1).waiting()) << "its children's reports pass there";
  for (std::size_t rank = nodes_.size(); rank-- > 1;) {
    node(rank).receive();
    const bool inner =
        !control::place_in_tree(node(rank).control->topology(), static_cast<int>(rank), 2)
             .children.empty();
    EXPECT_EQ(route(rank).forward_reports(), inner);
    EXPECT_EQ(node(rank).sent(), 1U) << "one message to its parent, rank " << rank;
  }
  EXPECT_FALSE(route(0).decide({})) << "no report has arrived";
  node(0).receive();
  EXPECT_TRUE(route(0).forward_reports());
  EXPECT_TRUE(route(0).decide({}));
  for (std::size_t rank = 0; rank < nodes_.size(); ++rank) {
    EXPECT_THAT(node(rank).receive(), ElementsAre(1U)) << "rank " << rank;
    const auto place =
        control::place_in_tree(node(rank).control->topology(), static_cast<int>(rank), 2);
    EXPECT_EQ(node(rank).sent(), 1U + place.children.size()) << "rank " << rank;
  }
}

TEST_F(ControlRouterTest, AHeldReportIsForwardedInTime) {
  make_tree();
  node(1).submit("x");
  EXPECT_FALSE(route(1).forward_reports()) << "ranks below have not submitted it";
  EXPECT_TRUE(route(1).waiting());
  ASSERT_TRUE(route(1).deadline().has_value());
  clock_.advance(*route(1).deadline() - clock_.now());
  EXPECT_TRUE(route(1).forward_reports());
  EXPECT_EQ(mail(0).size(), 1U);
}

TEST_F(ControlRouterTest, ReportsForARankThatTakesNoneAreErrors) {
  make({"a", "a", "a"});
  give(2, 1, wire::encode(wire::Report{}));
  EXPECT_THAT(error_of(1), HasSubstr("rank 2 reported to rank 1, which does not coordinate"));
  wire::Report merged;
  merged.applied = {{0, RankSet(1, 2)}};
  give(2, 0, wire::encode(merged));
  EXPECT_THAT(error_of(0), HasSubstr("rank 2 sent merged reports to rank 0"));
  network_->corrupt_next_message_to(0);
  give(1, 0, wire::encode(wire::Ping{}));
  EXPECT_THAT(error_of(0), HasSubstr("rank 0 received a corrupt message from rank 1: "));
}

TEST_F(ControlRouterTest, MessagesForTheEngineAreReturnedWithTheirSource) {
  make({"a", "a", "a"});
  give(1, 0, wire::encode(wire::ReplayUpdate{.position = 3}));
  give(2, 0, wire::encode(wire::Abort{2, {StatusCode::kInternal, "broken", -1}}));
  give(2, 0, wire::encode(wire::Blocked{0}));
  const auto received = route(0).receive();
  ASSERT_TRUE(received && std::holds_alternative<wire::ReplayUpdate>(received->payload));
  EXPECT_EQ(std::get<wire::ReplayUpdate>(received->payload).position, 3U);
  EXPECT_EQ(received->source, 1);
  EXPECT_TRUE(received->moves);
  const auto abort = route(0).receive();
  ASSERT_TRUE(abort && std::holds_alternative<wire::Abort>(abort->payload));
  EXPECT_EQ(std::get<wire::Abort>(abort->payload).cause.message, "broken");
  const auto blocked = route(0).receive();
  ASSERT_TRUE(blocked && std::holds_alternative<std::monostate>(blocked->payload));
  EXPECT_FALSE(blocked->moves) << "the message brings this rank no work";
  EXPECT_FALSE(route(0).receive().has_value());
}

TEST_F(ControlRouterTest, APingIsAnsweredAndTheCoordinatorThenChecksTheOtherRanks) {
  make({"a", "b", "c"});
  for (const int to : {0, 1}) {
    give(2, to, wire::encode(wire::Ping{}));
    EXPECT_TRUE(route(static_cast<std::size_t>(to)).receive()->moves);
  }
  const auto answers = mail(2);
  ASSERT_EQ(answers.size(), 2U);
  for (const auto& answer : answers) EXPECT_TRUE(std::holds_alternative<wire::Pong>(answer));
  begin_step();
  EXPECT_TRUE(route(0).waiting());
  EXPECT_FALSE(route(1).waiting());
  clock_.advance(options_.peer_timeout / 2);
  begin_step();
  EXPECT_FALSE(route(0).waiting());
}

// All ranks report that they are blocked: the coordinator ends the operations that they wait for.
TEST_F(ControlRouterTest, WhenAllRanksAreBlockedThePlanEndsTheirOperations) {
  make({"a", "a"});
  node(0).submit("x");
  node(1).submit("y");
  node(0).receive();
  for (const std::size_t rank : {0, 1}) route(rank).report_blocked();
  EXPECT_EQ(node(0).sent(), 2U);
  EXPECT_EQ(node(1).sent(), 2U);
  node(0).receive();
  EXPECT_EQ(node(0).received(), 4U);
  EXPECT_FALSE(route(0).decide({}));
  clock_.advance(options_.deadlock_timeout);
  begin_step();
  EXPECT_TRUE(route(0).decide({}));
  const auto plans = mail(1);
  ASSERT_EQ(plans.size(), 1U);
  EXPECT_EQ(std::get<wire::Plan>(plans[0]).errors.size(), 2U);
}

TEST_F(ControlRouterTest, StallsAreReportedOnce) {
  make({"a", "a"});
  node(0).submit("x");
  ASSERT_TRUE(route(0).deadline().has_value());
  EXPECT_EQ(*route(0).deadline(), clock_.now() + options_.stall_warning);
  EXPECT_THAT(route(0).waiting_texts(9),
              ElementsAre(HasSubstr("rank 1 (a) has submitted no operation yet")));
  EXPECT_THAT(route(1).waiting_texts(9), IsEmpty());
  for (int i = 0; i < 8; ++i) {  // with pauses that no process was stopped for
    route(0).log_stalls();
    EXPECT_EQ(node(0).counters.stalls.load(), 0U);
    clock_.advance(options_.stall_warning / 8);
    begin_step();
  }
  for (int i = 0; i < 2; ++i) route(0).log_stalls();
  route(1).log_stalls();
  EXPECT_EQ(node(0).counters.stalls.load(), 1U);
}

TEST_F(ControlRouterTest, AFailureIsSentToAllOrToRankZeroAndTwoOfEachOtherHost) {
  make({"a", "a", "b", "b", "b"});
  const wire::Abort lost{1, {StatusCode::kPeerLost, "lost", 4}};
  route(1).broadcast_failure(lost);
  std::vector<std::size_t> messages;
  for (const std::size_t rank : {0, 1, 2, 3, 4}) messages.push_back(mail(rank).size());
  EXPECT_THAT(messages, ElementsAre(1, 0, 1, 1, 0));
  route(0).broadcast_failure(lost);
  for (const std::size_t rank : {1, 2, 3, 4}) EXPECT_EQ(mail(rank).size(), 1U);
}

TEST_F(ControlRouterTest, OneRankNotifiesASuspect) {
  make({"a", "b", "c", "d"});
  for (const int lost : {0, 1, 3, -1}) {
    const wire::Abort abort{1, {StatusCode::kPeerLost, "lost", lost}};
    for (std::size_t rank = 0; rank < 4; ++rank) {
      if (static_cast<int>(rank) != lost) route(rank).notify_suspect(abort);
    }
    for (std::size_t rank = 0; rank < 4; ++rank)
      EXPECT_EQ(mail(rank).size(), static_cast<int>(rank) == lost ? 1U : 0U) << rank << lost;
  }
}

/// Uses a carrier that detects broken connections, which MPI does not.
class CarriedControlRouter : public ControlRouterTest {
 protected:
  CarriedControlRouter() {
    const PretendHosts pretend("abc");
    const auto shared = join_nodes(3);
    for (int rank = 0; rank < 3; ++rank) {
      auto plane = message::make_control_plane(carried_->carrier(rank),
                                               shared[static_cast<std::size_t>(rank)]);
      nodes_.push_back(std::make_unique<Node>(options_, std::move(plane), clock_));
    }
  }
  const std::shared_ptr<FakeNetwork> carried_ = FakeNetwork::create(3);
};

TEST_F(CarriedControlRouter, TheFailureOfRankZeroReachesTheOthersAllTheSame) {
  carried_->unreachable = 0;
  EXPECT_THROW(route(1).broadcast_failure({1, {StatusCode::kPeerLost, "lost", 0}}), Error);
  EXPECT_EQ(mail(2).size(), 1U);
}

TEST_F(CarriedControlRouter, ASuspectIsNotifiedOnlyIfTheCarrierAllowsIt) {
  for (const bool harmless : {false, true}) {
    carried_->may_send_to_lost = harmless;
    route(1).notify_suspect({0, {StatusCode::kPeerLost, "lost", 2}});
    EXPECT_EQ(mail(2).size(), harmless ? 1U : 0U);
  }
}

TEST_F(ControlRouterTest, TheWatchChecksOftenOnlyWhileSomethingDepends) {
  options_.peer_timeout = seconds(8);
  make({"a", "a"});
  PeerWatch& watch = node(0).watch;
  EXPECT_TRUE(watch.due(false)) << "for the first time";
  EXPECT_EQ(watch.next(), clock_.now() + seconds(2));
  clock_.advance(milliseconds(10));
  begin_step();
  EXPECT_FALSE(watch.due(false));
  EXPECT_FALSE(watch.due(true));
  EXPECT_EQ(watch.next(), clock_.now() + milliseconds(50)) << "it has got work";
  clock_.advance(milliseconds(50));
  begin_step();
  EXPECT_TRUE(watch.due(true));
  network_->kill(1);
  EXPECT_FALSE(watch.check(false).has_value()) << "nothing depends on it";
  const auto loss = watch.check(true);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->rank, 1);
  EXPECT_EQ(loss->cause, "it was killed");
}

TEST_F(ControlRouterTest, ARankOfAnotherHostIsPingedAndLostWithoutAnAnswer) {
  options_.peer_timeout = seconds(8);
  make({"a", "b", "c"}, false);
  const auto check = [&](std::size_t rank) {
    for (const auto& one : nodes_) one->control->heartbeat(clock_.now());
    return node(rank).watch.check(true);
  };
  EXPECT_FALSE(check(0).has_value());
  EXPECT_FALSE(check(1).has_value());
  EXPECT_EQ(node(0).sent(), 2U) << "it pings both";
  EXPECT_EQ(node(1).sent(), 1U) << "it pings rank 0";
  for (int i = 0; i < 3; ++i) {
    clock_.advance(seconds(3));
    begin_step();
    if (i < 2) {
      EXPECT_FALSE(check(0).has_value()) << i;
    }
    give(1, 0, wire::encode(wire::Pong{}));
    node(0).receive();
  }
  const auto loss = check(0);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->rank, 2);
  EXPECT_FALSE(loss->known);
  EXPECT_EQ(loss->cause, "it has not answered for 8000 ms");
}

TEST_F(ControlRouterTest, AForwardedReportIsASignOfLifeOfItsSource) {
  options_.peer_timeout = seconds(8);
  options_.control_radix = 2;
  make({"a", "b", "c", "d", "e", "f", "g", "h"}, false);
  for (int i = 0; i < 4; ++i) {
    begin_step();
    for (const auto& one : nodes_) one->control->heartbeat(clock_.now());
    EXPECT_FALSE(node(0).watch.check(true).has_value()) << "rank 3 is in rank 1's merged report";
    EXPECT_FALSE(node(1).watch.check(true).has_value()) << "the plan was made by rank 0";
    clock_.advance(seconds(3));
    for (const std::size_t rank : {1, 2, 4, 5, 6, 7}) give(rank, 0, wire::encode(wire::Pong{}));
    wire::Report merged;
    merged.applied.push_back({0, RankSet(3)});
    give(1, 0, wire::encode(merged));
    node(0).receive();
    wire::Plan plan;
    plan.sequence = static_cast<std::uint64_t>(i) + 1;
    node(1).apply(plan);
  }
}

}  // namespace
}  // namespace hvd::testing
