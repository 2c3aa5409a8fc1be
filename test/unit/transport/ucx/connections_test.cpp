#include "transport/ucx/connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "transport/control_plane.h"
#include "transport/request_table.h"
#include "unit/transport/ucx/carrier_on_fake_workers.h"

namespace hvd::ucx {
namespace {

using message::Plane;
using message::RequestTable;
using message::Tag;
using ::testing::ElementsAre;
using testing::error_of;
using testing::FakeUcx;
using testing::UcxCarrierTest;

TEST_F(UcxCarrierTest, ConnectsWhenSomethingIsSentOncePerPlaneAndPeer) {
  RequestTable data(*carrier, Plane::kData);
  RequestTable control(*carrier, Plane::kControl);
  data.reset(3);
  control.reset(1);
  data.receive(2, memory, 0, kTag);
  EXPECT_TRUE(ucx->connections.empty()) << "the sender connects";
  data.send(0, memory, 3, kTag);
  data.send(1, memory, 3, kTag);
  ASSERT_EQ(ucx->connections.size(), 1U);
  EXPECT_EQ(ucx->connections[0].peer, 3);
  EXPECT_EQ(ucx->connections[0].from, Side::kDataOut);
  EXPECT_EQ(ucx->connections[0].to, Side::kDataIn);
  control.send(0, memory, 3, kTag);
  ASSERT_EQ(ucx->connections.size(), 2U);
  EXPECT_EQ(ucx->connections[1].from, Side::kControlOut);
  EXPECT_EQ(ucx->connections[1].to, Side::kControlIn);
}

TEST_F(UcxCarrierTest, MessagesWaitForTheAnswerAndKeepTheirOrder) {
  ucx->peers_answer = false;
  RequestTable first(*carrier, Plane::kData);
  RequestTable second(*carrier, Plane::kData);
  first.reset(2);
  second.reset(1);
  first.send(1, memory, 2, kTag + 1);
  second.send(0, memory, 2, kTag + 2);
  first.send(0, memory, 2, kTag + 3);
  EXPECT_THAT(first.test(), ElementsAre());
  EXPECT_EQ(ucx->count("hello to 2"), 1);
  EXPECT_EQ(ucx->count("send to 2"), 0);
  ucx->receive_hello(Side::kDataOut, 3);  // from another rank
  EXPECT_THAT(first.test(), ElementsAre());
  EXPECT_EQ(ucx->count("send to 2"), 0);
  ucx->receive_hello(Side::kDataOut, 2);
  EXPECT_THAT(first.test(), ElementsAre());
  std::vector<Tag> tags;
  for (const FakeUcx::Request& request : ucx->requests)
    if (request.what == "send to 2") tags.push_back(request.tag);
  EXPECT_THAT(tags, ElementsAre(kTag + 1, kTag + 2, kTag + 3));
  end(sending(2), kOk);
  EXPECT_THAT(first.test(), ElementsAre(0));
}

TEST_F(UcxCarrierTest, AnswersAConnectionOnce) {
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  data.receive(0, memory, 2, kTag);
  ucx->receive_hello(Side::kDataIn, 2);
  ucx->receive_hello(Side::kDataIn, 2);
  ucx->receive_hello(Side::kDataIn, 4);   // there is no such rank
  ucx->receive_hello(Side::kDataIn, -1);  // nor this one
  EXPECT_THAT(data.test(), ElementsAre());
  ASSERT_EQ(ucx->connections.size(), 1U);
  EXPECT_EQ(ucx->connections[0].peer, 2);
  EXPECT_EQ(ucx->connections[0].from, Side::kDataIn);
  EXPECT_EQ(ucx->connections[0].to, Side::kDataOut)
      << "the connection leads to the worker that has connected";
  EXPECT_EQ(ucx->count("hello to 2"), 1);
  EXPECT_EQ(ucx->count("send to 2"), 0);
  ucx->receive_hello(Side::kControlIn, 3);
  EXPECT_FALSE(carrier->probe(kTag).has_value());
  EXPECT_EQ(ucx->count("hello to 3"), 1) << "probe() answers a Hello";
}

TEST_F(UcxCarrierTest, IgnoresAHelloThatDoesNotProveItsSender) {
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  data.receive(0, memory, 2, kTag);
  const auto send = [&](const JobMembers& members, int from, int to, Side side) {
    ucx->hellos[static_cast<std::size_t>(Side::kDataIn)].push_back(
        make_hello(members, from, to, side, false));
    ::testing::internal::CaptureStderr();
    EXPECT_THAT(data.test(), ElementsAre());
    return ::testing::internal::GetCapturedStderr();
  };
  JobMembers other = ucx->members;
  other.key = "another key";
  EXPECT_THAT(send(other, 2, 1, Side::kDataIn),
              ::testing::HasSubstr("claims to come from rank 2 does not prove"));
  other = ucx->members;
  other.generation = 4;
  EXPECT_EQ(send(other, 2, 1, Side::kDataIn), "") << "it is logged once";
  send(ucx->members, 2, 3, Side::kDataIn);     // sent to another rank
  send(ucx->members, 2, 1, Side::kControlIn);  // sent to another worker
  const Side side = Side::kDataIn;
  Hello altered = make_hello(ucx->members, 3, 1, side, false);
  altered.rank = 2;
  ucx->hellos[static_cast<std::size_t>(side)].push_back(altered);
  altered = make_hello(ucx->members, 2, 1, side, true);
  altered.leaves = 0;
  ucx->hellos[static_cast<std::size_t>(side)].push_back(altered);
  for (int round = 0; round < 4; ++round) EXPECT_THAT(data.test(), ElementsAre());
  EXPECT_TRUE(ucx->connections.empty());
  ucx->receive_hello(side, 2);
  EXPECT_THAT(data.test(), ElementsAre());
  EXPECT_EQ(ucx->connections.size(), 1U);
}

// Otherwise a receive, and the rank that has connected, would wait for the connection.
TEST_F(UcxCarrierTest, AnAnswerThatCannotBeSentIsTheEndOfTheConnection) {
  ucx->hello_answer = -25;
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.receive(0, memory, 2, kTag);
  ucx->receive_hello(Side::kDataIn, 2);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: receiving from rank 2 failed: trouble 25");
}

TEST_F(UcxCarrierTest, CannotConnectToARankThatMakesNoProgress) {
  ucx->hello_answer = -25;
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  EXPECT_EQ(error_of([&] { table.send(0, memory, 2, kTag); }),
            "ucx: sending to rank 2 failed: trouble 25");
}

// Such an error must not be a BrokenConnection, which means that the peer was lost.
TEST_F(UcxCarrierTest, WithoutDescriptorsNoPeerIsToBlame) {
  const auto limit_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const BrokenConnection& error) {
      return "blames rank " + std::to_string(error.rank());
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string expected = "ucx: rank 1 has reached a limit: no descriptor";
  ucx->shortage = "no descriptor";
  EXPECT_EQ(limit_of([&] { check(); }), expected) << "noticed without a failed call";
  EXPECT_EQ(limit_of([&] { check(); }), "no error");
  ucx->shortage = "no descriptor";
  ucx->connect_answer = -3;
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  EXPECT_EQ(limit_of([&] { table.send(0, memory, 2, kTag); }), expected);
  EXPECT_EQ(limit_of([&] { table.send(1, memory, 3, kTag); }), "blames rank 3");
}

TEST_F(UcxCarrierTest, NamesTheInterfaceOfABrokenConnection) {
  Workers workers = testing::fake_workers(ucx, 1);
  workers.interface = "eth7";
  const auto over_eth7 = make_ucx_carrier(std::move(workers), testing::members(1, 4));
  ucx->connect_answer = -25;
  RequestTable table(*over_eth7, Plane::kData);
  table.reset(1);
  EXPECT_EQ(error_of([&] { table.send(0, memory, 2, kTag); }),
            "ucx: sending to rank 2 over eth7 failed: trouble 25");
}

TEST_F(UcxCarrierTest, ConnectsAheadInBothDirections) {
  EXPECT_FALSE(carrier->connecting());
  carrier->connect(Plane::kData, 2);
  EXPECT_EQ(ucx->count("hello to 2"), 1);
  connect();  // rank 2 has answered, but has not connected to this rank yet
  EXPECT_TRUE(carrier->connecting());
  ucx->receive_hello(Side::kDataIn, 2);
  connect();
  EXPECT_FALSE(carrier->connecting());
  EXPECT_EQ(ucx->connections.size(), 2U);
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  data.send(0, memory, 2, kTag);
  EXPECT_EQ(ucx->count("send to 2"), 1) << "it is sent at once";
  EXPECT_EQ(ucx->connections.size(), 2U);
}

// Otherwise the peer waits until this rank receives its first message.
TEST_F(UcxCarrierTest, ConnectsUntilItsAnswerIsSent) {
  ucx->hellos_complete_at_once = false;
  carrier->connect(Plane::kData, 2);
  ucx->receive_hello(Side::kDataIn, 2);
  connect();
  for (FakeUcx::Request& request : ucx->requests)
    if (request.what == "hello to 2" && request.side == Side::kDataOut) end(request, kOk);
  connect();
  EXPECT_TRUE(carrier->connecting()) << "the answer is not sent";
  end(ucx->last("hello to 2"), kOk);
  connect();
  EXPECT_FALSE(carrier->connecting());
  EXPECT_TRUE(ucx->last("hello to 2").freed);
}

TEST_F(UcxCarrierTest, ABrokenConnectionIsNotWaitedFor) {
  ucx->peers_answer = false;
  carrier->connect(Plane::kControl, 3);
  connect();
  EXPECT_TRUE(carrier->connecting());
  ucx->break_connections(3, -25);
  EXPECT_FALSE(carrier->connecting());
}

TEST_F(UcxCarrierTest, LeavingInOrderSendsMessagesUnderWay) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(3);
  ucx->sends_complete_at_once = true;
  table.send(0, memory, 2, kTag);
  table.send(1, memory, 3, kTag);
  table.receive(2, memory, 0, kTag);
  ucx->receive_hello(Side::kDataIn, 0);
  connect();
  table.test();
  ucx->break_connections(3, -25);
  ucx->closes_complete = true;
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->count("flush 2"), 1);
  EXPECT_EQ(ucx->count("flush 3"), 0) << "a broken connection is not flushed";
  EXPECT_EQ(ucx->count("force 3"), 1);
  EXPECT_EQ(ucx->count("force 0"), 1) << "incoming messages are not awaited";
  EXPECT_EQ(ucx->kept(), 0);
  EXPECT_EQ(ucx->ended, static_cast<int>(kSides));
}

TEST_F(UcxCarrierTest, AConnectionThatBreaksWithoutAFarewellIsALoss) {
  const auto check_peers = [&] {
    EXPECT_FALSE(carrier->probe(kTag).has_value());
    return error_of([&] { check(); });
  };
  for (const int peer : {0, 2, 3}) ucx->receive_hello(Side::kControlIn, peer);
  ucx->receive_hello(Side::kDataIn, 2);
  EXPECT_EQ(check_peers(), "no error");
  ucx->receive_hello(Side::kControlIn, 0, true);
  EXPECT_EQ(check_peers(), "no error");
  ucx->break_connections(0, -80);
  EXPECT_EQ(check_peers(), "no error") << "it has left in order";
  ucx->break_connections(3, -80);
  ucx->receive_hello(Side::kControlIn, 3, true);
  EXPECT_EQ(error_of([&] { check(); }), "no error")
      << "it sent a farewell before its connection broke";
  ucx->break_connections(2, -80);
  EXPECT_EQ(check_peers(), "ucx: the connection with rank 2 failed: trouble 80");
  ignored = 2;
  EXPECT_EQ(check_peers(), "no error");
  ignored = -1;
  try {
    check();
  } catch (const BrokenConnection& error) {
    EXPECT_EQ(error.rank(), 2);
  }
}

TEST_F(UcxCarrierTest, ConnectsAheadAndDetectsAnAbsentRank) {
  ucx->peers_answer = false;
  carrier->connect(Plane::kControl, 2);
  carrier->connect(Plane::kControl, 2);
  carrier->connect(Plane::kControl, 3);
  ASSERT_EQ(ucx->connections.size(), 2U);
  EXPECT_EQ(ucx->connections[0].from, Side::kControlOut);
  EXPECT_EQ(ucx->connections[0].to, Side::kControlIn);
  RequestTable control(*carrier, Plane::kControl);
  control.reset(1);
  control.send(0, memory, 2, kTag);
  EXPECT_EQ(ucx->connections.size(), 2U);
  ucx->receive_hello(Side::kControlOut, 2);
  connect();
  EXPECT_EQ(ucx->count("send to 2"), 1);
  ucx->break_connections(2, -80);
  EXPECT_EQ(error_of([&] { check(); }), "no error")
      << "the rank may be leaving, and its farewell uses another connection";
  ucx->break_connections(3, -80);
  EXPECT_EQ(error_of([&] { check(); }), "ucx: the connection with rank 3 failed: trouble 80");
}

TEST_F(UcxCarrierTest, ConnectingAheadPrimesTheControlPlaneOfTheOtherRank) {
  carrier->connect(Plane::kControl, 2);
  carrier->connect(Plane::kControl, 2);
  std::vector<std::size_t> sizes;
  for (const FakeUcx::Request& request : ucx->requests) {
    if (request.what != "primer to 2") continue;
    EXPECT_TRUE(request.freed);
    EXPECT_EQ(request.side, Side::kControlOut);
    sizes.push_back(request.bytes);
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1500, 3000}));
  carrier->connect(Plane::kData, 2);
  RequestTable control(*carrier, Plane::kControl);
  control.reset(1);
  control.send(0, memory, 3, kTag);
  EXPECT_EQ(ucx->count("primer to 2"), 2) << "data has its receive posted";
  EXPECT_EQ(ucx->count("primer to 3"), 0) << "the first message would arrive behind them";
}

TEST_F(UcxCarrierTest, PrimersAreDropped) {
  const Tag primer =
      message::make_tag({.generation = carrier->generation(), .kind = message::kPrimerKind});
  std::string name = "primer";
  ucx->arrivals.push_back({.message = &name, .tag = primer, .bytes = 1500});
  ucx->arrivals.push_back({.message = &name, .tag = primer, .bytes = 3000});
  ucx->busy[static_cast<std::size_t>(Side::kControlIn)] = 1;
  EXPECT_FALSE(carrier->probe(kTag));
  EXPECT_TRUE(ucx->arrivals.empty());
  EXPECT_EQ(ucx->count("receive arrival primer"), 2);
  EXPECT_EQ(ucx->kept(), 0);
}

TEST_F(UcxCarrierTest, LeavingInOrderSendsAFarewellOnEachOwnConnection) {
  ucx->sends_complete_at_once = true;
  ucx->closes_complete = true;
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  data.send(0, memory, 3, kTag);
  carrier->connect(Plane::kControl, 2);
  ucx->receive_hello(Side::kControlIn, 0);
  connect();
  data.test();
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->count("farewell to 2"), 1);
  EXPECT_EQ(ucx->count("farewell to 3"), 0) << "a receive of data detects the end by itself";
  EXPECT_EQ(ucx->count("farewell to 0"), 0);
  const auto position = [&](const std::string& what) {
    return std::find_if(ucx->requests.begin(), ucx->requests.end(),
                        [&](const FakeUcx::Request& request) { return request.what == what; });
  };
  EXPECT_LT(position("farewell to 2"), position("flush 2"));
}

TEST_F(UcxCarrierTest, LeavingInOrderDoesNotWaitForAPeerThatIsStopped) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  ucx->sends_complete_at_once = true;
  table.send(0, memory, 2, kTag);
  connect();
  table.test();
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->count("flush 2"), 1);
  EXPECT_TRUE(ucx->last("flush 2").freed);
  EXPECT_EQ(ucx->ended, 0) << "Note [A worker that is not ended]";
}

TEST_F(UcxCarrierTest, LeavingInOrderClosesOnlyCompleteConnections) {
  ucx->peers_answer = false;
  ucx->closes_complete = true;
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  carrier->farewell();
  carrier.reset();
  EXPECT_TRUE(ucx->connections[0].open);
  EXPECT_EQ(ucx->ended, 0) << "Note [A worker that is not ended]";
}

}  // namespace
}  // namespace hvd::ucx
