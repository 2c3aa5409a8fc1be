// Sends and recvs of tensors on simulated GPUs, between the ranks of a job in one process, stepped
// in virtual time.
#include <gmock/gmock.h>

#include <numeric>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/point_to_point.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Ints = std::vector<std::int32_t>;
using std::chrono::milliseconds;

Ints numbers(std::size_t count, std::int32_t first) {
  Ints values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// Where the tensors of the sender and of the receiver are.
enum class Sides { kGpuToGpu, kHostToGpu, kGpuToHost };

class Messages : public DeviceJob {
 public:
  explicit Messages(std::uint64_t seed = 1, const runtime::RuntimeOptions& options = {})
      : DeviceJob(2, Path::kStaged, options, {}, seed) {}

  static TensorView host_view(Ints& values) {
    const auto count = static_cast<std::int64_t>(values.size());
    return {reinterpret_cast<std::byte*>(values.data()), count, DataType::kInt32, {}, {count}};
  }
  Operation start(int rank, Direction direction, const TensorView& tensor, EventPtr ready,
                  std::int64_t tag = 0) {
    const Message message{.direction = direction,
                          .tensor = tensor,
                          .peer = 1 - rank,
                          .tag = tag,
                          .input_ready = std::move(ready)};
    return runtime(rank).submit({&message, 1}, Progress::kBackground).front();
  }
  /// The tensor of a rank's message, on its GPU.
  std::pair<TensorView, EventPtr> on_gpu(int rank, const Ints& values) {
    auto [tensor, ready] = make<std::int32_t>(rank, values);
    return {tensor.view(DataType::kInt32), ready};
  }
};

class DeviceMessagesTest
    : public ::testing::TestWithParam<std::tuple<Sides, std::size_t, std::uint64_t>> {};

// Zero, one, the largest eager message, the next, one piece, and sizes around several rings.
INSTANTIATE_TEST_SUITE_P(
    Sizes, DeviceMessagesTest,
    ::testing::Combine(::testing::Values(Sides::kGpuToGpu, Sides::kHostToGpu, Sides::kGpuToHost),
                       ::testing::Values(0, 1, 2048, 2049, 65536, 65537, 262144, 600007),
                       ::testing::Values(1, 2)));

TEST_P(DeviceMessagesTest, AMessageArrives) {
  const auto [sides, count, seed] = GetParam();
  Messages job(seed);
  for (int round = 0; round < 2; ++round) {
    Ints sent = numbers(count, 3 + round), received(count, -1);
    EventPtr sent_ready, received_ready;
    TensorView from = Messages::host_view(sent), to = Messages::host_view(received);
    if (sides != Sides::kHostToGpu) std::tie(from, sent_ready) = job.on_gpu(0, sent);
    if (sides != Sides::kGpuToHost) std::tie(to, received_ready) = job.on_gpu(1, received);
    const Operation send = job.start(0, Direction::kSend, from, sent_ready);
    const Operation recv = job.start(1, Direction::kReceive, to, received_ready);
    ASSERT_TRUE(job.run({send, recv}));
    for (const Operation& operation : {send, recv}) {
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
      if (operation.output_ready())
        EXPECT_TRUE(operation.output_ready()->query()) << "the device has copied the tensor";
    }
    EXPECT_EQ(recv.result(), 0);
    if (sides != Sides::kGpuToHost) received = job.read<std::int32_t>(1, to, recv.output_ready());
    EXPECT_EQ(received, sent);
  }
  job.expect_no_faults();
}

/// An event that is reached only once it was opened.
class Gate final : public Event {
 public:
  explicit Gate(EventPtr inner) : inner_(std::move(inner)) {}
  void open() { open_ = true; }
  bool query() const override { return open_ && inner_->query(); }
  void* native() const noexcept override { return inner_->native(); }

 private:
  const EventPtr inner_;
  bool open_ = false;
};

TEST(DeviceMessages, FailWhenTheDeviceDoesNotGetThere) {
  runtime::RuntimeOptions options;
  options.stall_shutdown = milliseconds(50);
  Messages job(1, options);
  const auto [from, ready] = job.on_gpu(0, numbers(5000, 1));
  const auto [to, to_ready] = job.on_gpu(1, Ints(5000, -1));
  const Operation send = job.start(0, Direction::kSend, from, std::make_shared<Gate>(ready));
  const Operation recv = job.start(1, Direction::kReceive, to, to_ready);
  const TimePoint begin = job.clock().now();
  ASSERT_TRUE(job.run_until([&] { return send.done() && recv.done(); }, milliseconds(500)));
  EXPECT_GE(job.clock().now() - begin, options.stall_shutdown);
  for (const Operation& operation : {send, recv}) {
    EXPECT_EQ(operation.status().code, StatusCode::kPeerLost);
    EXPECT_THAT(operation.status().message,
                ::testing::HasSubstr("rank 0 waits for send (tag 0) to rank 1; expected its GPU"));
  }
}

TEST(DeviceMessages, AreMatchedInTheOrderOfTheCallsWhicheverIsReadyFirst) {
  Messages job;
  const auto [late, late_ready] = job.on_gpu(0, numbers(5000, 1));
  const auto gate = std::make_shared<Gate>(late_ready);  // reached last
  Ints second = numbers(4000, 7);
  const auto [first_in, first_in_ready] = job.on_gpu(1, Ints(5000, -1));
  const auto [second_in, second_in_ready] = job.on_gpu(1, Ints(4000, -1));
  const Operation first_send = job.start(0, Direction::kSend, late, gate);
  const Operation second_send =
      job.start(0, Direction::kSend, Messages::host_view(second), nullptr);
  const Operation first_recv = job.start(1, Direction::kReceive, first_in, first_in_ready);
  const Operation second_recv = job.start(1, Direction::kReceive, second_in, second_in_ready);
  ASSERT_TRUE(job.run({second_send, second_recv})) << "it does not wait for the first one's data";
  EXPECT_FALSE(first_send.done());
  EXPECT_FALSE(first_recv.done());
  gate->open();
  ASSERT_TRUE(job.run({first_send, first_recv}));
  EXPECT_EQ(job.read<std::int32_t>(1, first_in, first_recv.output_ready()), numbers(5000, 1));
  EXPECT_EQ(job.read<std::int32_t>(1, second_in, second_recv.output_ready()), second);
  job.expect_no_faults();
}

TEST(DeviceMessages, ManyShareAFewPinnedBuffers) {
  Messages job;
  for (int round = 0; round < 30; ++round) {
    std::vector<Operation> operations;
    std::vector<TensorView> outputs;
    for (int rank = 0; rank < 2; ++rank) {
      const auto [from, from_ready] = job.on_gpu(rank, numbers(3000, rank + round));
      const auto [to, to_ready] = job.on_gpu(rank, Ints(3000, -1));
      outputs.push_back(to);
      operations.push_back(job.start(rank, Direction::kSend, from, from_ready));
      operations.push_back(job.start(rank, Direction::kReceive, to, to_ready));
    }
    ASSERT_TRUE(job.run(operations));
    for (int rank = 0; rank < 2; ++rank)
      EXPECT_EQ(
          job.read<std::int32_t>(rank, outputs[static_cast<std::size_t>(rank)],
                                 operations[static_cast<std::size_t>(2 * rank + 1)].output_ready()),
          numbers(3000, 1 - rank + round));
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_LE(job.gpu().counts(rank).pinned_made, 4);
    EXPECT_EQ(job.gpu().counts(rank).synchronize, 0);
  }
  job.expect_no_faults();
}

TEST(DeviceMessages, EndWithTheJobAndKeepMemoryThatTheDeviceUses) {
  Messages job;
  const auto [to, ready] = job.on_gpu(1, Ints(70000, -1));
  const Operation recv = job.start(1, Direction::kReceive, to, ready);
  EXPECT_FALSE(job.run_until([&] { return recv.done(); }, milliseconds(10)));
  job.runtime(1).abort({StatusCode::kPeerLost, "a test ends the job"});
  ASSERT_TRUE(job.run({recv}));
  EXPECT_EQ(recv.status().code, StatusCode::kPeerLost);
  job.expect_no_faults();
}

TEST(DeviceMessages, RefuseTheGpuOfAnotherRankAndDifferentTensors) {
  Messages job;
  auto [to, ready] = job.on_gpu(1, Ints(100, -1));
  TensorView other = to;
  other.device.index = 1;
  EXPECT_THROW(job.start(1, Direction::kReceive, other, ready), UsageError);
  const auto [from, from_ready] = job.on_gpu(0, numbers(101, 0));
  const Operation send = job.start(0, Direction::kSend, from, from_ready);
  const Operation recv = job.start(1, Direction::kReceive, to, ready);
  ASSERT_TRUE(job.run({send, recv}));
  EXPECT_EQ(send.status().code, StatusCode::kMismatch);
  EXPECT_EQ(recv.status().code, StatusCode::kMismatch);
}

}  // namespace
}  // namespace hvd::testing
