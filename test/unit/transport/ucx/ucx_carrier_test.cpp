#include "transport/ucx/ucx_carrier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "transport/request_table.h"
#include "unit/transport/ucx/carrier_on_fake_workers.h"

namespace hvd::ucx {
namespace {

using message::MemoryRelease;
using message::Plane;
using message::RequestTable;
using message::Tag;
using ::testing::ElementsAre;
using testing::error_of;
using testing::FakeUcx;
using ::testing::HasSubstr;
using testing::members;
using testing::UcxCarrierTest;

TEST_F(UcxCarrierTest, ReportsItsNameRankAndGeneration) {
  EXPECT_EQ(carrier->name(), "ucx");
  EXPECT_EQ(carrier->rank(), 1);
  EXPECT_EQ(carrier->generation(), 3U);
  EXPECT_TRUE(carrier->active());
  EXPECT_FALSE(carrier->failed());
}

TEST_F(UcxCarrierTest, RefusesSetsThatExceedTheTags) {
  EXPECT_NO_THROW(carrier->require_tags_of(message::kMaxProcessSets - 1));
  EXPECT_THROW(carrier->require_tags_of(message::kMaxProcessSets), Error);
  EXPECT_THROW(make_ucx_carrier(testing::fake_workers(ucx, 0), members(0, 1, 1 << 16)), Error);
  JobMembers many;
  many.addresses.resize(message::kMaxRanks + 1);
  EXPECT_THAT(error_of([&] { make_ucx_carrier(testing::fake_workers(ucx, 0), many); }),
              HasSubstr("a job of 1048577 ranks"));
}

TEST_F(UcxCarrierTest, RefusesAnAddressThatIsNone) {
  for (const std::size_t bytes : {0UL, 3UL, 5UL, 23UL}) {
    JobMembers cut = members(0, 2);
    ASSERT_GT(cut.addresses[1].size(), bytes);
    cut.addresses[1].resize(bytes);
    EXPECT_THAT(error_of([&] { make_ucx_carrier(testing::fake_workers(ucx, 0), cut); }),
                HasSubstr("a rank's address is too short"))
        << bytes;
  }
}

TEST_F(UcxCarrierTest, OnlyWorkersWithMessagesMakeProgress) {
  RequestTable data(*carrier, Plane::kData);
  data.reset(2);
  data.receive(0, memory, 2, kTag);
  for (int look = 0; look < 80; ++look) data.test();
  EXPECT_EQ(ucx->progressed_by(Side::kDataIn), 80);
  EXPECT_EQ(ucx->progressed_by(Side::kDataOut), 10)
      << "occasionally, for messages that wait for room in a socket";
  EXPECT_EQ(ucx->progressed_by(Side::kControlIn), 0);
  EXPECT_EQ(ucx->progressed_by(Side::kControlOut), 0);
  end(ucx->last("receive"), kOk, memory.size());
  data.test();
  data.send(1, memory, 2, kTag);
  const int received = ucx->progressed_by(Side::kDataIn);
  const int sent = ucx->progressed_by(Side::kDataOut);
  for (int look = 0; look < 80; ++look) data.test();
  EXPECT_GE(ucx->progressed_by(Side::kDataOut), sent + 80);
  EXPECT_EQ(ucx->progressed_by(Side::kDataIn), received);
}

TEST_F(UcxCarrierTest, ReturnsCompletionsOfAnyTime) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(3);
  table.send(0, memory, 2, kTag);
  table.receive(1, memory, 2, kTag);
  connect();
  ucx->sends_complete_at_once = true;
  table.send(2, memory, 0, kTag);
  connect();
  EXPECT_THAT(table.test(), ElementsAre(2));
  EXPECT_THAT(table.test(), ElementsAre());
  EXPECT_EQ(ucx->last("receive").tag, kTag);
  EXPECT_EQ(ucx->last("receive").room.data(), memory.data());
  end(ucx->last("receive"), kOk, memory.size());
  end(sending(2), kOk);
  EXPECT_THAT(table.test(), ElementsAre(0, 1));
  EXPECT_EQ(table.in_flight(), 0);
  EXPECT_EQ(ucx->kept(), 0);
}

TEST_F(UcxCarrierTest, CallsProgressUntilUcxIsIdle) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  connect();
  const int before = ucx->progressed_by(Side::kDataOut);
  ucx->busy[static_cast<std::size_t>(Side::kDataOut)] = 5;
  EXPECT_THAT(table.test(), ElementsAre());
  EXPECT_EQ(ucx->progressed_by(Side::kDataOut), before + 6)
      << "otherwise the caller sleeps although UCX has more to do";
}

TEST_F(UcxCarrierTest, NamesThePeerOfASendThatFails) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  connect();
  end(sending(2), -25);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: sending to rank 2 failed: trouble 25");
  EXPECT_TRUE(sending(2).freed);
  EXPECT_EQ(table.cancel(), MemoryRelease::kDone);
}

TEST_F(UcxCarrierTest, ASendThatFailsThrowsOnceAndTheOthersContinue) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(3);
  table.send(0, memory, 2, kTag);
  table.send(1, memory, 3, kTag);
  table.send(2, memory, 0, kTag);
  connect();
  end(sending(2), kOk);
  end(sending(3), -25);
  EXPECT_THAT(table.test(), ElementsAre(0)) << "a failure must not drop completions";
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: sending to rank 3 failed: trouble 25");
  EXPECT_TRUE(table.idle(1));
  EXPECT_EQ(table.in_flight(), 1);
  EXPECT_THAT(table.test(), ElementsAre()) << "the failure has been reported";
  end(sending(0), kOk);
  EXPECT_THAT(table.test(), ElementsAre(2));
  EXPECT_EQ(table.in_flight(), 0);
  table.send(1, memory, 0, kTag);
  end(sending(0), kOk);
  EXPECT_THAT(table.test(), ElementsAre(1)) << "the slot can be used again";
}

TEST_F(UcxCarrierTest, NamesThePeerThatCannotBeReached) {
  ucx->connect_answer = -6;
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  EXPECT_EQ(error_of([&] { table.send(0, memory, 2, kTag); }),
            "ucx: sending to rank 2 failed: trouble 6");
  // Messages that it sent before it ended may have arrived.
  table.receive(1, memory, 0, kTag);
  end(ucx->last("receive"), kOk, memory.size());
  EXPECT_THAT(table.test(), ElementsAre(1));
}

TEST_F(UcxCarrierTest, MessagesThatWaitForAConnectionFailWithIt) {
  ucx->peers_answer = false;
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  ucx->break_connections(2, -25);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: sending to rank 2 failed: trouble 25");
  EXPECT_EQ(table.cancel(), MemoryRelease::kDone);
  table.reset(1);
  EXPECT_EQ(error_of([&] { table.send(0, memory, 2, kTag); }),
            "ucx: sending to rank 2 failed: trouble 25");
  EXPECT_EQ(ucx->connections.size(), 1U) << "UCX would confuse a second connection with the first";
  EXPECT_EQ(ucx->count("send to 2"), 0);
}

TEST_F(UcxCarrierTest, DoesNotWaitForAPeerBehindABrokenConnection) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(2);
  table.receive(0, memory, 0, kTag);
  table.receive(1, memory, 2, kTag);
  ucx->receive_hello(Side::kDataIn, 0);
  ucx->receive_hello(Side::kDataIn, 2);
  EXPECT_THAT(table.test(), ElementsAre());
  ucx->break_connections(2, -80);
  end(ucx->last("receive"), kOk, memory.size());
  EXPECT_THAT(table.test(), ElementsAre(1)) << "it arrived before the connection broke";
  ucx->break_connections(0, -80);
  EXPECT_EQ(error_of([&] { table.test(); }), "ucx: receiving from rank 0 failed: trouble 80");
  EXPECT_THAT(table.test(), ElementsAre()) << "the failure has been reported";
  EXPECT_EQ(table.in_flight(), 1) << "its memory is released by cancel()";
}

TEST_F(UcxCarrierTest, AMessageThatIsTooLongIsAnErrorWithAdvice) {
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
  auto& busy = ucx->busy[static_cast<std::size_t>(Side::kControlIn)];
  busy = 2;
  EXPECT_FALSE(carrier->probe(tag).has_value()) << "a message of another generation does not match";
  EXPECT_EQ(busy, 0) << "UCX has fetched all messages";
}

TEST_F(UcxCarrierTest, CancelsMessagesThatHaveNotBegunAndTheJobContinues) {
  ucx->peers_answer = false;
  RequestTable data(*carrier, Plane::kData);
  data.reset(2);
  data.send(0, memory, 2, kTag);
  data.receive(1, memory, 0, kTag);
  EXPECT_EQ(data.cancel(), MemoryRelease::kDone);
  EXPECT_TRUE(ucx->last("receive").cancelled);
  EXPECT_EQ(ucx->count("force 2"), 0) << "no connection is closed";
  data.reset(2);
  data.send(0, memory, 2, kTag + 1);
  ucx->receive_hello(Side::kDataOut, 2);
  data.receive(1, memory, 0, kTag + 1);
  EXPECT_THAT(data.test(), ElementsAre());
  EXPECT_EQ(ucx->count("send to 2"), 1) << "the first message is dropped";
  EXPECT_EQ(sending(2).tag, kTag + 1);
}

TEST_F(UcxCarrierTest, CancelsMessagesUnderWayByStoppingTheirWorker) {
  RequestTable data(*carrier, Plane::kData);
  RequestTable other(*carrier, Plane::kData);
  RequestTable control(*carrier, Plane::kControl);
  data.reset(1);
  other.reset(1);
  control.reset(2);
  control.send(0, memory, 2, kTag);
  connect();
  FakeUcx::Request& of_control = sending(2);
  data.send(0, memory, 2, kTag);
  other.send(0, memory, 3, kTag);
  connect();
  EXPECT_EQ(data.cancel(), MemoryRelease::kDone);
  const int progressed = ucx->progressed_by(Side::kDataOut);
  EXPECT_TRUE(sending(2).freed);
  EXPECT_TRUE(ucx->connections[1].open) << "closing a connection may end a process";
  EXPECT_EQ(error_of([&] { other.test(); }), "ucx: sending to rank 3 failed: trouble 16");
  data.reset(1);
  EXPECT_THAT(error_of([&] { data.send(0, memory, 3, kTag); }), HasSubstr("have been closed"));

  end(of_control, kOk);
  EXPECT_THAT(control.test(), ElementsAre(0)) << "the control plane goes on";
  control.send(0, memory, 0, kTag);
  connect();
  EXPECT_EQ(ucx->count("send to 0"), 1);
  EXPECT_TRUE(carrier->active());
  carrier->farewell();
  carrier.reset();
  EXPECT_EQ(ucx->progressed_by(Side::kDataOut), progressed)
      << "the worker must make no more progress";
  EXPECT_EQ(ucx->ended, 0) << "Note [A worker that is not ended]";
}

TEST_F(UcxCarrierTest, TakesBackAReceiveThatHasBeenMatched) {
  ucx->cancel_ends_receives = false;
  RequestTable data(*carrier, Plane::kData);
  data.reset(2);
  data.receive(0, memory, 2, kTag);
  ucx->sends_complete_at_once = true;
  data.send(1, memory, 2, kTag);
  connect();
  EXPECT_EQ(data.cancel(), MemoryRelease::kDone);
  EXPECT_EQ(data.in_flight(), 0);
  EXPECT_EQ(ucx->kept(), 0);
  const int progressed = ucx->progressed_by(Side::kDataIn);
  carrier->progress();
  EXPECT_EQ(ucx->progressed_by(Side::kDataIn), progressed);
  data.reset(1);
  EXPECT_THAT(error_of([&] { data.receive(0, memory, 2, kTag); }), HasSubstr("have been closed"));
}

TEST_F(UcxCarrierTest, MemoryThatOthersTouchIsNeverGivenBack) {
  auto workers = testing::fake_workers(std::make_shared<FakeUcx>(), 1);
  workers.only_workers_touch_memory = false;
  carrier = make_ucx_carrier(std::move(workers), members(1, 4));
  RequestTable waits(*carrier, Plane::kControl);
  waits.reset(1);
  waits.receive(0, memory, 2, kTag);
  EXPECT_EQ(waits.cancel(), MemoryRelease::kDone) << "it has not been matched";
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  data.send(0, memory, 2, kTag);
  connect();
  EXPECT_EQ(data.cancel(), MemoryRelease::kNever);
  EXPECT_EQ(data.cancel(), MemoryRelease::kNever);
}

class UnusedReader final : public message::PartReader {
 public:
  void read(std::span<const std::byte>) noexcept override { ADD_FAILURE(); }
};

TEST_F(UcxCarrierTest, WorkersPassOnPartsWhereNothingElseTouchesMemory) {
  UnusedReader reader;
  RequestTable data(*carrier, Plane::kData);
  data.reset(1);
  EXPECT_FALSE(data.receive_parts(0, reader, memory.size(), 2, kTag)) << "this worker cannot";
  EXPECT_EQ(data.in_flight(), 0);
  ucx->passes_on_parts = true;
  EXPECT_TRUE(data.receive_parts(0, reader, memory.size(), 2, kTag));
  EXPECT_EQ(ucx->last("receive parts").tag, kTag);
  end(ucx->last("receive parts"), kOk, memory.size());
  EXPECT_EQ(data.test().size(), 1U);

  auto workers = testing::fake_workers(ucx, 1);
  workers.only_workers_touch_memory = false;
  carrier = make_ucx_carrier(std::move(workers), members(1, 4));
  RequestTable other(*carrier, Plane::kData);
  other.reset(1);
  EXPECT_FALSE(other.receive_parts(0, reader, memory.size(), 2, kTag));
}

TEST_F(UcxCarrierTest, WithoutAControlPlaneThereAreNoMessages) {
  RequestTable control(*carrier, Plane::kControl);
  control.reset(1);
  control.send(0, memory, 2, kTag);
  connect();
  EXPECT_EQ(control.cancel(), MemoryRelease::kDone);
  EXPECT_FALSE(carrier->active());
  EXPECT_NO_THROW(carrier->progress());
}

TEST_F(UcxCarrierTest, NoConnectionIsClosedAfterAFailure) {
  RequestTable table(*carrier, Plane::kData);
  table.reset(1);
  table.send(0, memory, 2, kTag);
  connect();
  carrier->farewell();
  carrier->mark_failed();
  EXPECT_TRUE(carrier->failed());
  carrier.reset();
  EXPECT_TRUE(ucx->connections[0].open);
  EXPECT_TRUE(sending(2).freed)
      << "requests that outlive the carrier keep no request of the worker";
  EXPECT_EQ(table.cancel(), MemoryRelease::kDone);
  EXPECT_EQ(ucx->ended, 0);
}

}  // namespace
}  // namespace hvd::ucx
