#include "transport/control_plane.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "support/fake_carrier.h"
#include "support/join_nodes.h"
#include "support/reference.h"
#include "transport/request_table.h"

// Cases that the tests over MPI cannot make: the end of a job whose carrier is broken or releases
// memory late, and messages that no rank of hvd sends.

namespace hvd::message {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::FakeNetwork;

constexpr std::size_t kLimit = std::size_t{256} << 20;

/// All ranks of a job, driven by one thread.
struct Job {
  explicit Job(int size) : network(FakeNetwork::create(size, 7)), nodes(testing::join_nodes(size)) {
    for (int rank = 0; rank < size; ++rank) {
      planes.push_back(make_control_plane(network->carrier(rank),
                                          nodes[static_cast<std::size_t>(rank)],
                                          {.use_mail_rings = false}));
    }
  }
  control::ControlPlane& operator[](std::size_t rank) { return *planes[rank]; }

  std::shared_ptr<FakeNetwork> network;
  std::vector<std::shared_ptr<host::Node>> nodes;
  std::vector<std::unique_ptr<control::ControlPlane>> planes;
};

Bytes numbered(int number) { return Bytes(4, static_cast<std::byte>(number)); }

TEST(MessageControlPlane, KeepsTheOrderOfEachRank) {
  Job job(3);
  for (int number = 0; number < 10; ++number) {
    for (std::size_t rank = 1; rank < 3; ++rank) job[rank].send(0, numbered(number));
  }
  int next[3] = {};
  for (int count = 0; count < 20; ++count) {
    const auto message = job[0].poll();
    ASSERT_TRUE(message.has_value()) << count;
    EXPECT_EQ(message->bytes, numbered(next[message->source]++)) << "from rank " << message->source;
  }
  EXPECT_FALSE(job[0].poll().has_value());
  EXPECT_TRUE(job[0].quiet());
  const std::vector<int> others{1, 2};
  job[0].send(others, numbered(42));
  for (std::size_t rank = 1; rank < 3; ++rank) {
    EXPECT_EQ(job[rank].quiet(), false) << "a message is under way";
    const auto message = job[rank].poll();
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->source, 0);
    EXPECT_EQ(message->bytes, numbered(42));
    EXPECT_TRUE(job[rank].quiet());
  }
}

// A rank that has died in the middle of its message does not keep back the report of its death.
TEST(MessageControlPlane, AMessageThatNeverArrivesInFullDelaysNoOtherRank) {
  Job job(3);
  job.network->stalled_source = 1;
  job[1].send(0, numbered(1));
  job[1].send(0, numbered(2));
  EXPECT_FALSE(job[0].poll().has_value());
  job[2].send(0, numbered(3));
  const auto report = job[0].poll();
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->source, 2);
  EXPECT_EQ(report->bytes, numbered(3));
  EXPECT_FALSE(job[0].poll().has_value());
  EXPECT_TRUE(job[0].busy());
  job.network->stalled_source = -1;
  for (int number = 1; number <= 2; ++number) {
    const auto message = job[0].poll();
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->bytes, numbered(number));
  }
  EXPECT_FALSE(job[0].poll().has_value());
  EXPECT_TRUE(job[0].quiet());
}

TEST(MessageControlPlane, RingsForAMessageAndAgainWhenALateOneIsSent) {
  Job job(2);
  job.network->eager_bytes = 0;
  const auto ticket = [&] { return job[0].doorbell().ticket(); };
  const auto before = ticket();
  job[1].send(0, numbered(1));
  EXPECT_TRUE(job[1].busy());
  const auto rung = ticket();
  EXPECT_NE(rung, before);
  EXPECT_TRUE(job[0].poll().has_value());
  EXPECT_EQ(ticket(), rung);
  EXPECT_FALSE(job[1].poll().has_value());
  EXPECT_FALSE(job[1].busy());
  EXPECT_NE(ticket(), rung) << "the receiver may have gone to sleep before the message was sent";
}

TEST(MessageControlPlane, PollsForAnAnnouncedMessageUntilItArrives) {
  Job job(2);
  for (const bool at_once : {true, false}) {
    job.network->delivers_at_once = at_once;
    EXPECT_FALSE(job[0].needs_polling());
    const int progressed = job.network->progressed();
    job[1].heartbeat(TimePoint());
    EXPECT_EQ(job.network->progressed() - progressed, at_once ? 0 : 1);
    job[1].send(0, numbered(1));
    EXPECT_EQ(job[0].needs_polling(), !at_once) << "the doorbell may have been rung too early";
    EXPECT_FALSE(job[1].needs_polling());
    EXPECT_TRUE(job[0].poll().has_value());
    EXPECT_FALSE(job[0].needs_polling());
  }
}

TEST(MessageControlPlane, RefusesAMessageBeyondTheLimitOnBothSides) {
  Job job(2);
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(kLimit + 1);
  const std::span<const std::byte> large(memory.get(), kLimit + 1);
  EXPECT_THROW(job[1].send(0, large), Error);
  // Another build may have another limit.
  job.network->eager_bytes = 0;
  const auto stranger = job.network->carrier(1);
  RequestTable requests(*stranger, Plane::kControl);
  requests.reset(1);
  requests.send(0, large, 0, make_tag({.generation = 7, .source = 1, .kind = kControlKind}));
  try {
    job[0].poll();
    ADD_FAILURE() << "no throw";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what())
                  .find("receiving from rank 1: a control message of 268435457 "
                        "bytes; the limit is 268435456"),
              0U)
        << error.what();
  }
}

TEST(MessageControlPlane, TakesNoMessageOfAnotherJob) {
  Job job(2);
  const auto stranger = job.network->carrier(1);
  RequestTable requests(*stranger, Plane::kControl);
  requests.reset(1);
  const Bytes message = numbered(1);
  requests.send(0, message, 0, make_tag({.generation = 6, .source = 1, .kind = kControlKind}));
  EXPECT_FALSE(job[0].poll().has_value());
}

TEST(MessageControlPlane, CancelsItsMessagesWhenItLeaves) {
  Job job(2);
  job.network->eager_bytes = 0;
  job.network->pending_cancels = 3;
  job[1].send(0, numbered(1));
  job[1].farewell();
  EXPECT_EQ(job.network->farewells(), 1);
  const auto before = std::chrono::steady_clock::now();
  job.planes[1].reset();
  EXPECT_LT(std::chrono::steady_clock::now() - before, 2s);
  EXPECT_EQ(job.network->cancel_calls(), 4);
  EXPECT_FALSE(job[0].poll().has_value()) << "it was cancelled";
  EXPECT_EQ(job.network->failures(), 0);
}

// The connection does not exist yet, and the other rank does not run for a while.
TEST(MessageControlPlane, LeavesInOrderOnlyWhenALateRankHasItsMessages) {
  Job job(2);
  job.network->eager_bytes = 0;
  job.network->delivers_at_once = false;
  job[1].send(0, numbered(1));
  job[1].farewell();
  std::thread leaving([&] { job.planes[1].reset(); });
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(job.network->cancel_calls(), 0);
  const auto message = job[0].poll();
  leaving.join();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, numbered(1));
}

TEST(MessageControlPlane, MarksTheCarrierAsFailedWhenItCannotLeave) {
  Job job(2);
  job.network->eager_bytes = 0;
  job[1].send(0, numbered(1));
  job.network->broken = true;
  EXPECT_THROW(job[1].poll(), Error);
  EXPECT_THROW(job[0].poll(), Error);
  job.planes[1].reset();
  EXPECT_EQ(job.network->failures(), 1);
}

TEST(MessageControlPlane, LingersForOtherHostsOnceItHasAccused) {
  const testing::PretendHosts pretend("aab");
  Job job(3);
  job.planes[1].reset();
  EXPECT_EQ(job.network->progressed(), 0) << "no message is under way";
  job[0].report_loss(2, "lost rank 2");
  job.planes[0].reset();
  EXPECT_GT(job.network->progressed(), 0);
}

TEST(MessageControlPlane, LingersAlsoWhereAMessageToTheLostRankFails) {
  const testing::PretendHosts pretend("abc");
  Job job(3);
  job.network->eager_bytes = 0;
  job[0].send(1, numbered(1));
  job.network->unreachable = 1;
  job[0].report_loss(1, "lost rank 1");
  job.planes[0].reset();
  EXPECT_GT(job.network->progressed(), 1);
}

TEST(MessageControlPlane, NotifiesAndRingsTheOthersWhenARankIsLost) {
  Job job(3);
  job.network->unreachable = 1;
  const auto ticket = job[2].doorbell().ticket();
  const std::vector<int> others{1, 2};
  EXPECT_THROW(job[0].send(others, numbered(1)), Error);
  EXPECT_NE(job[2].doorbell().ticket(), ticket);
  const auto message = job[2].poll();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, numbered(1));
}

// The received message may hold the cause of the failure.
TEST(MessageControlPlane, ReturnsReceivedMessagesBeforeASendFails) {
  Job job(3);
  job.network->eager_bytes = 0;
  job[1].send(2, numbered(1));
  job[0].send(1, numbered(2));
  job.network->unreachable = 2;
  const auto message = job[1].poll();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, numbered(2));
  EXPECT_THROW(job[1].poll(), Error);
}

TEST(MessageControlPlane, ALossEndsAllWaiting) {
  Job job(2);
  job[1].report_loss(1, "lost itself");
  const SteadyClock clock;
  const auto loss = job[0].check_peers(clock.now(), 1h);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->rank, 1);
  EXPECT_TRUE(loss->known);
  EXPECT_EQ(job.network->failures(), 1);
}

TEST(MessageControlPlane, ARankThatLostAnUnknownRankIsLost) {
  Job job(2);
  job[1].report_loss(host::ControlSegment::kUnknownRank, "not all ranks arrived");
  const SteadyClock clock;
  const auto loss = job[0].check_peers(clock.now(), 1h);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->rank, 1);
  EXPECT_EQ(loss->cause, "not all ranks arrived");
}

/// A carrier that connects by itself, within some calls of progress().
class ConnectingCarrier final : public Carrier {
 public:
  explicit ConnectingCarrier(std::shared_ptr<Carrier> carrier) : carrier_(std::move(carrier)) {}

  std::string_view name() const noexcept override { return carrier_->name(); }
  int rank() const noexcept override { return carrier_->rank(); }
  std::uint32_t generation() const noexcept override { return carrier_->generation(); }
  void require_tags_of(int process_set) const override { carrier_->require_tags_of(process_set); }
  std::unique_ptr<Requests> make_requests(Plane plane) override {
    return carrier_->make_requests(plane);
  }
  std::optional<ProbedMessage> probe(Tag tag) override { return carrier_->probe(tag); }
  void connect(Plane plane, int rank) override {
    EXPECT_EQ(plane, Plane::kControl);
    connected.push_back(rank);
  }
  bool connecting() const noexcept override { return polls < polls_needed; }
  void progress() override { ++polls; }
  bool delivers_at_once() const noexcept override { return carrier_->delivers_at_once(); }
  bool may_send_to_lost() const noexcept override { return carrier_->may_send_to_lost(); }
  bool active() const noexcept override { return carrier_->active(); }
  void farewell() noexcept override { carrier_->farewell(); }
  void mark_failed() noexcept override { carrier_->mark_failed(); }
  bool failed() const noexcept override { return carrier_->failed(); }

  std::vector<int> connected;
  int polls = 0;
  int polls_needed = 5;

 private:
  const std::shared_ptr<Carrier> carrier_;
};

TEST(MessageControlPlane, WaitsForConnectionsWithOtherHostsThoughNotForEver) {
  const testing::PretendHosts pretend("abc");
  const auto network = FakeNetwork::create(3, 7);
  const auto nodes = testing::join_nodes(3);
  const auto carrier = std::make_shared<ConnectingCarrier>(network->carrier(1));
  const auto plane = make_control_plane(carrier, nodes[1]);
  const std::vector<int> ranks = {0, 2};
  plane->expect_messages(ranks);
  EXPECT_EQ(carrier->connected, ranks);
  EXPECT_EQ(carrier->polls, 5);
  carrier->polls_needed = std::numeric_limits<int>::max();
  plane->expect_messages(ranks);
}

TEST(MessageControlPlane, RanksOfOneHostDoNotConnectAhead) {
  const auto network = FakeNetwork::create(2, 7);
  const auto nodes = testing::join_nodes(2);
  const auto carrier = std::make_shared<ConnectingCarrier>(network->carrier(1));
  const std::vector<int> ranks = {0};
  make_control_plane(carrier, nodes[1])->expect_messages(ranks);
  EXPECT_TRUE(carrier->connected.empty());
}

}  // namespace
}  // namespace hvd::message
