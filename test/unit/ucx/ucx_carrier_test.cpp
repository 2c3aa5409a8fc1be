#include "ucx/ucx_carrier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "message/request_table.h"
#include "unit/ucx/fake_worker.h"

namespace hvd::ucx {
namespace {

using message::Arrival;
using message::Plane;
using message::RequestTable;
using message::Tag;
using message::TakenBack;
using ::testing::ElementsAre;
using testing::FakeUcx;
using testing::FakeWorker;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::string error_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

Membership members(int rank, int size, std::uint32_t generation = 3) {
  Membership made{.rank = rank, .generation = generation, .addresses = {}};
  for (int other = 0; other < size; ++other)
    made.addresses.push_back({static_cast<std::byte>(other)});
  return made;
}

/// Rank 1 of 4.
class UcxCarrierTest : public ::testing::Test {
 protected:
  FakeUcx::Request& sending(int peer) { return ucx->last("send to " + std::to_string(peer)); }
  void end(FakeUcx::Request& request, Status status, std::size_t bytes = 0) {
    request.status = status;
    request.bytes = bytes;
  }

  static constexpr Tag kTag = 77;
  const std::shared_ptr<FakeUcx> ucx = std::make_shared<FakeUcx>();
  std::shared_ptr<message::Carrier> carrier =
      make_ucx_carrier(std::make_unique<FakeWorker>(ucx), members(1, 4));
  std::vector<std::byte> memory = std::vector<std::byte>(64);
};

TEST_F(UcxCarrierTest, SaysWhatItIs) {
  EXPECT_EQ(carrier->name(), "ucx");
  EXPECT_EQ(carrier->rank(), 1);
  EXPECT_EQ(carrier->generation(), 3U);
  EXPECT_TRUE(carrier->active());
  EXPECT_FALSE(carrier->failed());
}

TEST_F(UcxCarrierTest, RefusesWhatTagsHaveNoRoomFor) {
  EXPECT_NO_THROW(carrier->require_tags_of(message::kMostProcessSets - 1));
  EXPECT_THROW(carrier->require_tags_of(message::kMostProcessSets), Error);
  EXPECT_THROW(make_ucx_carrier(std::make_unique<FakeWorker>(ucx), members(0, 1, 1 << 16)), Error);
  EXPECT_THROW(
      make_ucx_carrier(std::make_unique<FakeWorker>(ucx), members(0, message::kMostRanks + 1)),
      Error);
}

TEST_F(UcxCarrierTest, ConnectsWhenAMessageWantsItAndOncePerPlaneAndPeer) {
  RequestTable data(*carrier, Plane::kData);
  RequestTable control(*carrier, Plane::kControl);
  data.reset(3);
  control.reset(1);
  EXPECT_TRUE(ucx->connections.empty());
  data.send(0, memory, 3, kTag);
  data.send(1, memory, 3, kTag);
  EXPECT_EQ(ucx->connections.size(), 1U);
  control.send(0, memory, 3, kTag);
  EXPECT_EQ(ucx->connections.size(), 2U);
  data.receive(2, memory, 0, kTag);
  ASSERT_EQ(ucx->connections.size(), 3U);
  EXPECT_EQ(ucx->connections[0].peer, 3);
  EXPECT_EQ(ucx->connections[1].peer, 3);
  EXPECT_EQ(ucx->connections[2].peer, 0);
}

TEST_F(UcxCarrierTest, SaysWhatHasCompletedWheneverItDid) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(3);
  table.send(0, memory, 2, kTag);
  table.receive(1, memory, 2, kTag);
  ucx->sends_complete_at_once = true;
  table.send(2, memory, 0, kTag);
  EXPECT_THAT(table.test(), ElementsAre(2));
  EXPECT_THAT(table.test(), ElementsAre());
  EXPECT_EQ(ucx->last("receive").tag, kTag);
  EXPECT_EQ(ucx->last("receive").room.data(), memory.data());
  end(ucx->last("receive"), kOk, memory.size());
  end(sending(2), kOk);
  EXPECT_THAT(table.test(), ElementsAre(0, 1));
  EXPECT_EQ(table.in_flight(), 0);
  for (const FakeUcx::Request& request : ucx->requests) EXPECT_TRUE(request.freed) << request.what;
}

TEST_F(UcxCarrierTest, LetsUcxWorkUntilItHasNothingToDo) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  ucx->busy = 5;
  EXPECT_THAT(table.test(), ElementsAre());
  EXPECT_EQ(ucx->progressed, 6) << "or the caller goes to sleep over what UCX has half done";
}

TEST_F(UcxCarrierTest, NamesThePeerOfASendThatFails) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  end(sending(2), -25);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: sending to rank 2 failed: trouble 25");
  EXPECT_TRUE(sending(2).freed);
  EXPECT_EQ(table.take_back(), TakenBack::kDone);
}

TEST_F(UcxCarrierTest, NamesThePeerThatCannotBeReached) {
  ucx->connect_answer = -6;
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  EXPECT_EQ(error_of([&] { table.send(0, memory, 2, kTag); }),
            "ucx: sending to rank 2 failed: trouble 6");
  // What it has sent before it ended may be here.
  table.receive(1, memory, 0, kTag);
  end(ucx->last("receive"), kOk, memory.size());
  EXPECT_THAT(table.test(), ElementsAre(1));
}

TEST_F(UcxCarrierTest, DoesNotWaitForAPeerWhoseConnectionIsBroken) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  table.receive(0, memory, 0, kTag);
  table.receive(1, memory, 2, kTag);
  ucx->break_connection(2, -80);
  end(ucx->last("receive"), kOk, memory.size());
  EXPECT_THAT(table.test(), ElementsAre(1)) << "it came before the connection broke";
  ucx->break_connection(0, -80);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: receiving from rank 0 failed: trouble 80");
  EXPECT_EQ(error_of([&] { table.send(1, memory, 0, kTag); }),
            "ucx: sending to rank 0 failed: trouble 80");
}

TEST_F(UcxCarrierTest, AMessageThatIsTooLongIsAnErrorThatSaysWhy) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.receive(0, memory, 2, kTag);
  end(ucx->last("receive"), kTruncated);
  EXPECT_THAT(error_of([&] { table.test(); }), HasSubstr("rank 2 sent a longer message"));
}

TEST_F(UcxCarrierTest, AReceiveThatCannotBeginIsAnError) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  ucx->receive_answer = -4;
  EXPECT_EQ(error_of([&] { table.receive(0, memory, 2, kTag); }),
            "ucx: receiving from rank 2 failed: trouble 4");
  EXPECT_EQ(table.in_flight(), 0);
}

TEST_F(UcxCarrierTest, ProbesForAnySource) {
  const Tag tag = message::make_tag({.generation = 3, .source = 1, .kind = message::kControlKind});
  std::string first = "x";
  ucx->arrivals.push_back({&first, message::with_source(tag, 2), 5});
  ucx->arrivals.push_back({nullptr, message::with_source(tag, 0) + (Tag{1} << 48), 6});
  const auto arrival = carrier->probe(tag);
  ASSERT_TRUE(arrival.has_value());
  EXPECT_EQ(arrival->source, 2);
  EXPECT_EQ(arrival->bytes, 5U);
  RequestTable table(*carrier, Plane::kControl);
  table.reset(1);
  table.receive(0, std::span(memory).first(5), *arrival);
  end(ucx->last("receive arrival x"), kOk, 5);
  EXPECT_THAT(table.test(), ElementsAre(0));
  ucx->busy = 2;
  EXPECT_FALSE(carrier->probe(tag).has_value()) << "that of another generation is not ours";
  EXPECT_EQ(ucx->busy, 0) << "UCX has fetched what there was";
}

TEST_F(UcxCarrierTest, TakesBackByClosingTheConnectionsOfThatPlane) {
  RequestTable data(*carrier, Plane::kData);
  RequestTable control(*carrier, Plane::kControl);
  data.reset(2);
  control.reset(1);
  control.send(0, memory, 2, kTag);
  FakeUcx::Request& of_control = sending(2);
  ucx->close_ends_sends = false;  // the fake does not tell the planes apart
  data.send(0, memory, 2, kTag);
  data.receive(1, memory, 0, kTag);
  EXPECT_EQ(data.take_back(), TakenBack::kPending);
  EXPECT_EQ(ucx->count("force 2"), 1);
  EXPECT_EQ(ucx->count("force 0"), 1);
  EXPECT_FALSE(ucx->connections[1].open);
  EXPECT_TRUE(ucx->connections[0].open) << "control messages have to go on";
  EXPECT_TRUE(ucx->last("receive").cancelled);
  end(sending(2), -16);
  EXPECT_EQ(data.take_back(), TakenBack::kDone);
  EXPECT_EQ(ucx->count("force 2"), 1) << "asked once";
  EXPECT_EQ(data.in_flight(), 0);
  EXPECT_FALSE(ucx->ended);
  EXPECT_TRUE(carrier->active());

  end(of_control, kOk);
  EXPECT_THAT(control.test(), ElementsAre(0));
  data.reset(1);
  data.send(0, memory, 2, kTag);
  EXPECT_EQ(ucx->connections.size(), 4U) << "a new one";
}

TEST_F(UcxCarrierTest, AbandonsTheWorkerWhenNothingElseGivesTheMemoryBack) {
  ucx->cancel_ends_receives = false;
  RequestTable data(*carrier, Plane::kData);
  RequestTable control(*carrier, Plane::kControl);
  data.reset(1);
  control.reset(1);
  data.receive(0, memory, 2, kTag);
  control.send(0, memory, 0, kTag);
  EXPECT_EQ(data.take_back(), TakenBack::kPending);
  EXPECT_FALSE(ucx->ended);
  EXPECT_TRUE(message::wait_for_memory(data, std::chrono::steady_clock::now() + 60s));
  EXPECT_FALSE(carrier->active());
  EXPECT_EQ(ucx->count("force 0"), 1) << "that of the control plane too";
  const int progressed = ucx->progressed;
  for (const FakeUcx::Request& request : ucx->requests) EXPECT_TRUE(request.freed) << request.what;
  EXPECT_EQ(control.take_back(), TakenBack::kDone);
  EXPECT_THAT(error_of([&] { control.send(0, memory, 0, kTag); }), HasSubstr("have been closed"));
  EXPECT_THAT(error_of([&] { carrier->probe(kTag); }), HasSubstr("have been closed"));
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->progressed, progressed) << "UCX must not be let work any more";
  EXPECT_FALSE(ucx->ended) << "Note [A worker that is not ended]";
}

TEST_F(UcxCarrierTest, LeavingInOrderSendsOffWhatIsUnderWay) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  ucx->sends_complete_at_once = true;
  table.send(0, memory, 2, kTag);
  table.send(1, memory, 3, kTag);
  table.test();
  ucx->break_connection(3, -25);
  ucx->closes_complete = true;
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->count("flush 2"), 1);
  EXPECT_EQ(ucx->count("flush 3"), 0) << "nothing leaves through a broken connection";
  EXPECT_EQ(ucx->count("force 3"), 1);
  for (const FakeUcx::Request& request : ucx->requests) EXPECT_TRUE(request.freed) << request.what;
  EXPECT_TRUE(ucx->ended);
}

TEST_F(UcxCarrierTest, LeavingInOrderDoesNotWaitForAPeerThatIsStopped) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  ucx->sends_complete_at_once = true;
  table.send(0, memory, 2, kTag);
  table.test();
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->count("flush 2"), 1);
  EXPECT_TRUE(ucx->last("flush 2").freed);
  EXPECT_FALSE(ucx->ended) << "Note [A worker that is not ended]";
}

TEST_F(UcxCarrierTest, WhereSomethingHasFailedNothingIsSentOff) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  carrier->farewell();
  carrier->mark_failed();
  EXPECT_TRUE(carrier->failed());
  carrier.reset();
  EXPECT_EQ(ucx->count("flush 2"), 0);
  EXPECT_EQ(ucx->count("force 2"), 1) << "or the peer would learn of it when the process ends";
  EXPECT_TRUE(sending(2).freed) << "requests that outlive the carrier hold nothing of the worker";
  EXPECT_EQ(table.take_back(), TakenBack::kDone);
}

}  // namespace
}  // namespace hvd::ucx
