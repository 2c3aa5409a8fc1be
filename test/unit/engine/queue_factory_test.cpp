// Tests which backend and which queue a batch gets.
#include "engine/queue_factory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/batches.h"
#include "support/fake_gpu.h"
#include "support/fakes.h"

namespace hvd::testing {
namespace {

using runtime::Batch;
using ::testing::ElementsAre;

/// Opens no channel, and records the instances that it should have opened.
class RecordingBackend final : public Backend {
 public:
  RecordingBackend(std::vector<int>& instances, std::string name, DeviceType device, int score)
      : instances_(instances), name_(std::move(name)), device_(device), score_(score) {}
  std::string_view name() const noexcept override { return name_; }
  int score(const Topology&, const ChannelSpec& spec, const Collective&) const noexcept override {
    return spec.device.type == device_ ? score_ : 0;
  }
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Peers&) override {
    instances_.push_back(spec.instance);
    return nullptr;
  }

 private:
  std::vector<int>& instances_;
  const std::string name_;
  const DeviceType device_;
  const int score_;
};

class QueueFactoryTest : public ::testing::Test {
 protected:
  static wire::Request alone(std::int64_t count, OpKind kind = OpKind::kAllreduce) {
    wire::Request asked = float_request("x", count, kind);
    asked.alone = true;
    return asked;
  }
  std::shared_ptr<Backend> backend(const std::string& name, DeviceType device, int score) {
    return std::make_shared<RecordingBackend>(instances_, name, device, score);
  }
  std::unique_ptr<runtime::QueueFactory> queues(std::vector<std::shared_ptr<Backend>> backends) {
    return runtime::make_queue_factory({.topology = topology_, .peers = peers_, .device = device_},
                                       std::move(backends), {});
  }
  /// A batch of this operation alone; for a gathering kind each rank has as many rows as the
  /// request.
  static Batch batch_of(const wire::Request& asked, int ranks = 2) {
    control::AgreedBatch agreed = agreed_batch({asked}, ranks);
    agreed.operations.front().first_dims.assign(static_cast<std::size_t>(ranks),
                                                asked.shape.front());
    return Batch(std::move(agreed), {}, 0);
  }
  std::string queue_of(const wire::Request& asked, int ranks = 2) {
    const auto factory = queues({backend("host", DeviceType::kCpu, 1)});
    const Batch batch = batch_of(asked, ranks);
    const runtime::ChannelQueue opened = factory->open(batch);
    EXPECT_EQ(opened.backend, factory->choose(batch));
    EXPECT_EQ(opened.urgent, opened.backend.ends_with(", urgent"));
    return opened.backend;
  }

  Topology topology_{.rank = 0, .size = 2};
  FakePeers peers_{0, 2};
  std::vector<int> instances_;
  FakeGpu gpu_;
  std::shared_ptr<device::Context> device_ = std::make_shared<device::Context>(gpu_.api(0), 0);
};

TEST_F(QueueFactoryTest, ASmallOperationThatIsAloneGetsTheUrgentQueue) {
  EXPECT_EQ(queue_of(float_request("x", 8)), "host");
  EXPECT_EQ(queue_of(alone(8)), "host, urgent");
  EXPECT_EQ(queue_of(alone(8, OpKind::kAllgather)), "host, urgent");
  EXPECT_THAT(instances_, ElementsAre(0, 4, 4));
}

TEST_F(QueueFactoryTest, TheBytesOfAllRanksDecideWhetherAnOperationIsSmall) {
  constexpr std::int64_t kMaxUrgent = 64 << 10;  // elements of 4 bytes
  EXPECT_EQ(queue_of(alone(kMaxUrgent)), "host, urgent");
  EXPECT_EQ(queue_of(alone(kMaxUrgent + 1)), "host");
  EXPECT_EQ(queue_of(alone(kMaxUrgent / 2, OpKind::kAllgather)), "host, urgent");
  EXPECT_EQ(queue_of(alone(kMaxUrgent / 2 + 1, OpKind::kAllgather)), "host");
}

TEST_F(QueueFactoryTest, OtherKindsAndSetsOfOneRankHaveNoUrgentQueue) {
  EXPECT_EQ(queue_of(alone(8, OpKind::kBroadcast)), "host");
  EXPECT_EQ(queue_of(alone(8, OpKind::kReducescatter)), "host");
  EXPECT_EQ(queue_of(alone(8), 1), "host");
  EXPECT_THAT(instances_, ElementsAre(0, 0, 0));
}

TEST_F(QueueFactoryTest, TheBackendWithTheHighestScoreRunsABatch) {
  for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
    wire::Request asked = float_request("x", 8);
    asked.device = device;
    const Batch batch = batch_of(asked);
    const auto low = backend("low", device, 1), high = backend("high", device, 3),
               same = backend("same", device, 3), none = backend("none", device, 0);
    EXPECT_EQ(queues({low, high})->choose(batch), "high");
    EXPECT_EQ(queues({high, low})->choose(batch), "high");
    EXPECT_EQ(queues({low, high, same, none})->choose(batch), "high") << "the first of equal ones";
  }
}

}  // namespace
}  // namespace hvd::testing
