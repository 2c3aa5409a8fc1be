// Which batches share a queue: what decides it, and what is opened for it.
#include "engine/queue_factory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/batches.h"

namespace hvd::testing {
namespace {

using ::testing::ElementsAre;

/// Opens nothing, and notes what it was asked to open.
class NotingBackend final : public Backend {
 public:
  explicit NotingBackend(std::vector<int>& instances) : instances_(instances) {}
  std::string_view name() const noexcept override { return "noting"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override {
    return 1;
  }
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Peers&) override {
    instances_.push_back(spec.instance);
    return nullptr;
  }

 private:
  std::vector<int>& instances_;
};

class NoPeers final : public Peers {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  void ring(int) noexcept override {}
};

class QueueFactoryTest : public ::testing::Test {
 protected:
  static wire::Request alone(std::int64_t count, OpKind kind = OpKind::kAllreduce) {
    wire::Request asked = float_request("x", count, kind);
    asked.alone = true;
    return asked;
  }
  /// The queue of a batch of this one operation, of as many rows from each rank as it has.
  std::string queue_of(const wire::Request& asked, int ranks = 2) {
    control::AgreedBatch agreed = agreed_batch({asked}, ranks);
    agreed.operations.front().first_dims.assign(static_cast<std::size_t>(ranks),
                                                asked.shape.front());
    const runtime::Batch batch(std::move(agreed), {}, 0);
    const runtime::ChannelQueue opened = queues_->open(batch);
    EXPECT_EQ(opened.backend, queues_->choose(batch));
    EXPECT_EQ(opened.urgent, opened.backend.ends_with(", urgent"));
    return opened.backend;
  }

  Topology topology_{.rank = 0, .size = 2};
  NoPeers peers_;
  std::vector<int> instances_;
  std::unique_ptr<runtime::QueueFactory> queues_ = runtime::make_queue_factory(
      {.topology = topology_, .peers = peers_}, {std::make_shared<NotingBackend>(instances_)}, {});
};

TEST_F(QueueFactoryTest, WhatIsSmallAndAloneDoesNotQueueBehindTheRest) {
  EXPECT_EQ(queue_of(float_request("x", 8)), "noting");
  EXPECT_EQ(queue_of(alone(8)), "noting, urgent");
  EXPECT_EQ(queue_of(alone(8, OpKind::kAllgather)), "noting, urgent");
  EXPECT_THAT(instances_, ElementsAre(0, 4, 4));
}

TEST_F(QueueFactoryTest, SmallCountsWhatAllRanksMoveTogether) {
  constexpr std::int64_t kMost = 64 << 10;  // of 4 bytes
  EXPECT_EQ(queue_of(alone(kMost)), "noting, urgent");
  EXPECT_EQ(queue_of(alone(kMost + 1)), "noting");
  EXPECT_EQ(queue_of(alone(kMost / 2, OpKind::kAllgather)), "noting, urgent");
  EXPECT_EQ(queue_of(alone(kMost / 2 + 1, OpKind::kAllgather)), "noting");
}

TEST_F(QueueFactoryTest, OtherKindsAndRanksThatAreAloneHaveOneQueue) {
  EXPECT_EQ(queue_of(alone(8, OpKind::kBroadcast)), "noting");
  EXPECT_EQ(queue_of(alone(8, OpKind::kReducescatter)), "noting");
  EXPECT_EQ(queue_of(alone(8), 1), "noting");
  EXPECT_THAT(instances_, ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace hvd::testing
