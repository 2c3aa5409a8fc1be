#include "unit/backend/nccl/nccl_channel_test.h"

#include <cmath>
#include <string>
#include <utility>

#include "support/sixteen_bit.h"

namespace hvd::testing {
namespace {

TEST_F(NcclChannelTest, OpensWithoutBlockingInAnyOrder) {
  start(3);
  for (int round = 0; round < 20; ++round)
    EXPECT_FALSE(ranks_[0]->channel->ready()) << "the others have not joined";
  EXPECT_EQ(nccl_->counts(2).inits, 0);
  EXPECT_TRUE(connect(3));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(nccl_->counts(rank).inits, 1);
  EXPECT_EQ(gpu_.faults().size(), 0U);
}

TEST_F(NcclChannelTest, ARankThatDoesNotJoinIsLostAfterTheDeadline) {
  start(2, {}, {.init_timeout = seconds(7)});
  EXPECT_FALSE(ranks_[0]->channel->ready());
  clock_.now_ += seconds(8);
  try {
    ranks_[0]->channel->ready();
    ADD_FAILURE() << "expected a PeerLostError";
  } catch (const PeerLostError& error) {
    EXPECT_NE(std::string(error.what()).find("not ready after 7 s"), std::string::npos)
        << error.what();
    EXPECT_EQ(error.rank(), -1);
  }
}

TEST_F(NcclChannelTest, TheDeadlineHoldsInsideNcclToo) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "nccl_launcher_test covers this with a launcher";
  start(2, {.busy_answers = 1000000}, {.init_timeout = seconds(7)});
  EXPECT_FALSE(connect(2));
  clock_.now_ += seconds(8);
  EXPECT_THROW(ranks_[1]->channel->ready(), PeerLostError);
  ranks_[1]->channel->abort();
  EXPECT_TRUE(nccl_->wait_for_aborts(1, 1));
  ranks_[1]->channel->abort();
  ranks_[1]->channel->wait_for_abort();
  EXPECT_EQ(nccl_->counts(1).aborted, 1) << "once";
}

TEST_F(NcclChannelTest, AnErrorOfTheInitIsThrownOnItsRankWithoutAnAbort) {
  start(2, {.init_throws_at = 1});
  try {
    connect(2);
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).ends_with("fake NCCL: no socket interface found"))
        << error.what();
  }
  for (const auto& rank : ranks_) rank->channel->abort();
  EXPECT_EQ(nccl_->counts(1).aborted, 0)
      << "there is no communicator to abort (Horovod aborts null)";
  end_left_threads();
}

TEST_F(NcclChannelTest, AnInitThatFailsLaterIsAnErrorThatNamesTheCommunicator) {
  start(2, {.init_fails_at = 1});
  try {
    connect(2);
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("process set 0 (rank 1 of 2, device 0) has failed: "), std::string::npos)
        << text;
    EXPECT_TRUE(text.ends_with("out of device memory")) << text;
  }
}

TEST_F(NcclChannelTest, WaitsForTheInputAndRecordsTheOutputOnTheDevice) {
  start(2);
  ASSERT_TRUE(connect(2));
  const FakeGpuCounts before = gpu_.counts(0);
  for (int step = 0; step < 30; ++step) {
    std::vector<std::unique_ptr<Work>> works;
    std::vector<std::span<std::byte>> tensors;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      // The program's own queue writes the tensor and reads the result.
      device::Context& device = *ranks_[rank]->device;
      const device::OwnedStream app(device);
      const device::DeviceGuard guard(device.api(), 0);
      tensors.push_back(tensor(std::vector<float>(100)));
      const float value = static_cast<float>(rank) + 1;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      device.api().fill(tensors.back().data(), 100, 4, bits, app.get());
      Collective collective = sum(100);
      collective.input_ready = device.events()->record(app.get());
      works.push_back(ranks_[rank]->channel->launch(collective, tensors.back(), tensors.back()));
      while (!works.back()->progress()) {
      }
      device.wait(app.get(), works.back()->output_ready());
      device.api().copy(gpu_.allocate(400), tensors.back().data(), 400,
                        device::Direction::kOnDevice, app.get());
    }
    EXPECT_TRUE(gpu_.run_all());
    EXPECT_EQ(values_of(tensors[0]), std::vector<float>(100, 3.0F));
  }
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  const FakeGpuCounts after = gpu_.counts(0);
  EXPECT_EQ(after.synchronize, 0);
  EXPECT_EQ(after.allocate, before.allocate);
  EXPECT_EQ(after.launches - before.launches, 30)
      << "the kernel of the test; an unscaled sum needs no kernel of hvd";
  EXPECT_EQ(nccl_->counts(0).launches, 30);
}

// The engine fails a Work that makes no progress for HVD_STALL_SHUTDOWN, if the Work counts it.
TEST_F(NcclChannelTest, ALaunchThatDoesNotReturnMakesNoProgress) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "the launch may return at any moment";
  start(2, {.busy_answers = 5});
  ASSERT_TRUE(connect(2));
  std::vector<std::unique_ptr<Work>> works;
  for (const auto& rank : ranks_) {
    const std::span<std::byte> memory = tensor({1, 2});
    works.push_back(rank->channel->launch(sum(2), memory, memory));
    for (int look = 0; look < 3; ++look) {
      EXPECT_FALSE(works.back()->progress());
      ASSERT_TRUE(works.back()->progress_count().has_value());
      EXPECT_EQ(works.back()->progress_count().value().moves, 0U);
    }
  }
  complete(works);
}

TEST_F(NcclChannelTest, AveragesWithNcclsOwnOperationOrAFactorBehindTheSum) {
  start(2);
  ASSERT_TRUE(connect(2));
  Collective average = sum(3);
  average.scale.divisor = 2;
  EXPECT_EQ(allreduce(average, {{1, 2, 3}, {3, 6, 9}}), (std::vector<float>{2, 4, 6}));
  EXPECT_EQ(gpu_.counts(0).launches, 0);
  average.scale.divisor = 1;
  average.scale.postscale = 0.5;
  average.scale.prescale = 4;
  EXPECT_EQ(allreduce(average, {{1, 2, 3}, {3, 6, 9}}), (std::vector<float>{8, 16, 24}));
  EXPECT_EQ(gpu_.counts(0).launches, 2) << "one kernel before, one after";
  // One rank has called join(), so the sum is divided by the number of remaining ranks.
  Collective joined = sum(1);
  joined.scale.divisor = 3;
  EXPECT_EQ(allreduce(joined, {{3}, {6}}), (std::vector<float>{3}));
  EXPECT_EQ(nccl_->counts(0).reductions,
            (std::vector<nccl::Reduction>{nccl::Reduction::kAverage, nccl::Reduction::kSum,
                                          nccl::Reduction::kSum}));
}

class NcclAverageTest : public NcclChannelTest,
                        public ::testing::WithParamInterface<std::pair<DataType, int>> {};

TEST_P(NcclAverageTest, Of16BitNumbersIsUnbiased) {
#if defined(HVD_SANITIZED)
  constexpr std::size_t kValues = 1 << 14;
#else
  constexpr std::size_t kValues = 1 << 20;
#endif
  const auto [type, size] = GetParam();
  start(size);
  ASSERT_TRUE(connect(static_cast<std::size_t>(size)));
  const SixteenBitAverage numbers = sixteen_bit_average(type, size, kValues);
  std::vector<std::span<std::byte>> tensors;
  std::vector<std::unique_ptr<Work>> works;
  Collective average = sum(kValues);
  average.dtype = type;
  average.scale.divisor = size;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    tensors.emplace_back(gpu_.allocate(kValues * 2), kValues * 2);
    std::memcpy(tensors.back().data(), numbers.inputs[rank].data(), kValues * 2);
    works.push_back(ranks_[rank]->channel->launch(average, tensors.back(), tensors.back()));
  }
  complete(works);
  std::vector<std::uint16_t> result(kValues);
  std::memcpy(result.data(), tensors.front().data(), kValues * 2);
  EXPECT_LT(std::abs(mean_relative_error(type, result, numbers.mean)), std::ldexp(1.0, -12));
  const bool power_of_two = (size & (size - 1)) == 0;
  EXPECT_EQ(gpu_.counts(0).launches, power_of_two ? 0 : 1) << "kernels of hvd";
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, NcclAverageTest,
    ::testing::Values(std::pair(DataType::kBFloat16, 3), std::pair(DataType::kBFloat16, 6),
                      std::pair(DataType::kFloat16, 3), std::pair(DataType::kFloat16, 6),
                      std::pair(DataType::kBFloat16, 4)),
    [](const auto& test) {
      return std::string(to_string(test.param.first)) + "By" + std::to_string(test.param.second);
    });

TEST_F(NcclChannelTest, AScaledReducescatterKeepsItsInput) {
  start(2);
  ASSERT_TRUE(connect(2));
  const std::vector<std::int64_t> counts = {2, 1};
  Collective scatter;
  scatter.kind = OpKind::kReducescatter;
  scatter.counts = counts;
  scatter.scale.prescale = 10;
  std::vector<std::span<std::byte>> inputs = {tensor({1, 2, 3}), tensor({4, 5, 6})};
  std::vector<std::span<std::byte>> outputs = {tensor({0, 0}), tensor({0})};
  std::vector<std::unique_ptr<Work>> works;
  for (std::size_t rank = 0; rank < 2; ++rank)
    works.push_back(ranks_[rank]->channel->launch(scatter, inputs[rank], outputs[rank]));
  complete(works);
  EXPECT_EQ(values_of(outputs[0]), (std::vector<float>{50, 70}));
  EXPECT_EQ(values_of(outputs[1]), (std::vector<float>{90}));
  EXPECT_EQ(values_of(inputs[0]), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(nccl_->counts(0).calls, 2) << "a reduction to each rank";
  EXPECT_EQ(nccl_->counts(0).launches, 1) << "in one launch";
}

TEST_F(NcclChannelTest, AWorkWaitsForMemoryThatTheHelperAllocates) {
  std::vector<std::function<void()>> aside;
  run_on_helper_ = [&aside](std::function<void()> function) {
    aside.push_back(std::move(function));
  };
  const auto run_all_aside = [&aside] {
    for (const auto& function : std::exchange(aside, {})) function();
  };
  start(2, {}, {.registered_bytes = 4096});
  const auto ask = [this] { return ranks_[0]->channel->ready() || ranks_[1]->channel->ready(); };
  ASSERT_TRUE(soon([&] {
    EXPECT_FALSE(ask());
    return aside.size() == 2;
  })) << "one for each rank";
  for (int round = 0; round < 50; ++round) EXPECT_FALSE(ask());
  EXPECT_EQ(aside.size(), 2U);
  run_all_aside();
  ASSERT_TRUE(connect(2));
  EXPECT_EQ(nccl_->counts(1).registered, 2);
  const std::vector<std::int64_t> counts = {1, 1};
  Collective scatter;
  scatter.kind = OpKind::kReducescatter;
  scatter.counts = counts;
  scatter.scale.prescale = 10;
  std::vector<std::span<std::byte>> outputs = {tensor({0}), tensor({0})};
  std::vector<std::unique_ptr<Work>> works;
  for (std::size_t rank = 0; rank < 2; ++rank)
    works.push_back(ranks_[rank]->channel->launch(scatter, tensor({1, 2}), outputs[rank]));
  for (int round = 0; round < 5; ++round) EXPECT_FALSE(works[0]->progress());
  EXPECT_EQ(nccl_->counts(0).calls, 0);
  run_all_aside();
  complete(works);
  EXPECT_EQ(values_of(outputs[1]), (std::vector<float>{40}));
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  for (const auto& rank : ranks_) rank->channel->release_fusion_buffers();
  EXPECT_EQ(nccl_->counts(0).allocated, 2) << "the helper has not freed them yet";
  works.clear();
  run_all_aside();
  EXPECT_EQ(nccl_->counts(0).allocated, 0);
  end_ranks();
  run_all_aside();
}

TEST_F(NcclChannelTest, AnErrorAfterTheLaunchIsFoundAndAbortEndsTheKernels) {
  start(2);
  ASSERT_TRUE(connect(2));
  const auto memory = tensor({1, 2, 3});
  const auto work = ranks_[0]->channel->launch(sum(3), memory, memory);  // the other never launches
  while (!work->progress()) {
  }
  EXPECT_FALSE(gpu_.run_all()) << "it waits for the other";
  EXPECT_NO_THROW(ranks_[0]->channel->check_health());
  nccl_->break_rank(0, true, "remote process exited");
  try {
    ranks_[0]->channel->check_health();
    ADD_FAILURE() << "expected a PeerLostError";
  } catch (const PeerLostError& error) {
    EXPECT_NE(std::string(error.what()).find("remote process exited"), std::string::npos)
        << error.what();
  }
  ranks_[0]->channel->abort();
  ranks_[0]->channel->wait_for_abort();
  EXPECT_TRUE(gpu_.run_all()) << "no work is left on the device";
  EXPECT_EQ(nccl_->counts(0).aborted, 1);
  EXPECT_THROW(ranks_[0]->channel->launch(sum(3), memory, memory), Error);
  EXPECT_NO_THROW(ranks_[0]->channel->check_health());
  end_ranks();
  EXPECT_EQ(nccl_->counts(0).destroyed, 0) << "abort has freed it";
}

TEST_F(NcclChannelTest, LocalErrorsAreNotPeerLosses) {
  start(1);
  ASSERT_TRUE(connect(1));
  nccl_->break_rank(0, false, "unhandled cuda error");
  try {
    ranks_[0]->channel->check_health();
    ADD_FAILURE() << "expected an Error";
  } catch (const PeerLostError&) {
    ADD_FAILURE() << "a local error is not a lost peer";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("unhandled cuda error"), std::string::npos);
  }
}

TEST_F(NcclChannelTest, EndsInOrder) {
  start(2);
  ASSERT_TRUE(connect(2));
  end_ranks();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(nccl_->counts(rank).finalized, 1);
    EXPECT_EQ(nccl_->counts(rank).destroyed, 1);
    EXPECT_EQ(nccl_->counts(rank).aborted, 0);
  }
}

TEST_F(NcclChannelTest, DeclinesCollectivesThatNcclDoesNotCompute) {
  start(1);
  const auto score = [&](OpKind kind, DataType type, ReduceOp op, ReduceScale scale,
                         DeviceType device) {
    Collective collective;
    collective.kind = kind;
    collective.dtype = type;
    collective.op = op;
    collective.scale = scale;
    return ranks_[0]->backend->score({}, {.device = {device, 0}}, collective);
  };
  const auto sums = ReduceOp::kSum;
  EXPECT_GT(score(OpKind::kAllreduce, DataType::kFloat16, sums, {1, 1, 2}, DeviceType::kCuda), 0);
  EXPECT_EQ(score(OpKind::kAllreduce, DataType::kFloat16, sums, {}, DeviceType::kCpu), 0);
  EXPECT_EQ(score(OpKind::kAllreduce, DataType::kInt64, sums, {1, 1, 2}, DeviceType::kCuda), 0)
      << "exact on the host";
  EXPECT_GT(score(OpKind::kAllreduce, DataType::kInt64, sums, {}, DeviceType::kCuda), 0);
  EXPECT_EQ(score(OpKind::kReducescatter, DataType::kInt16, sums, {}, DeviceType::kCuda), 0)
      << "NCCL does not have it";
  for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    EXPECT_EQ(score(OpKind::kAllreduce, DataType::kInt32, op, {}, DeviceType::kCuda), 0)
        << "NCCL does not have it";
    EXPECT_EQ(score(OpKind::kReducescatter, DataType::kBool, op, {}, DeviceType::kCuda) > 0,
              op != ReduceOp::kBitXor)
        << "a minimum or maximum, except for " << to_string(op);
  }
  EXPECT_GT(score(OpKind::kBroadcast, DataType::kInt16, sums, {}, DeviceType::kCuda), 0)
      << "moved as bytes";
  EXPECT_EQ(score(OpKind::kAllreduce, DataType::kFloat32, ReduceOp::kAdasum, {}, DeviceType::kCuda),
            0);
}

TEST_F(NcclChannelTest, CommunicatorsOfOneDeviceDoNotWaitForEachOther) {
  start(2);
  ASSERT_TRUE(connect(2));
  const auto second = open_second();
  // Two kernels in the queues of each rank at a time, launched in the same order on both.
  for (int step = 0; step < 30; ++step) {
    std::vector<std::unique_ptr<Work>> works;
    std::vector<std::span<std::byte>> tensors;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      for (Channel* const channel : {ranks_[rank]->channel.get(), second[rank].get()}) {
        tensors.push_back(tensor({1, 2}));
        works.push_back(channel->launch(sum(2), tensors.back(), tensors.back()));
      }
    }
    for (const auto& work : works) {
      while (!work->progress()) {
      }
    }
    ASSERT_TRUE(gpu_.run_all()) << "step " << step << ": "
                                << (gpu_.faults().empty() ? "" : gpu_.faults().front());
    for (const auto& memory : tensors) EXPECT_EQ(values_of(memory), (std::vector<float>{2, 4}));
  }
}

// The previous test relies on this.
TEST_F(NcclChannelTest, TheSimulationFindsKernelsThatWaitForEachOther) {
  nccl_ = std::make_unique<FakeNccl>(gpu_, FakeNcclOptions{.busy_answers = 0});
  const std::shared_ptr<nccl::Library> libraries[] = {nccl_->library(0), nccl_->library(1)};
  const nccl::UniqueId ids[] = {libraries[0]->make_id(), libraries[0]->make_id()};
  for (int rank = 0; rank < 2; ++rank) {
    device::Context device(gpu_.api(rank), 0);
    const device::OwnedStream stream(device);
    nccl::Library& library = *libraries[rank];
    const nccl::Comm comms[] = {library.begin_init(ids[0], 2, rank, nccl::Blocking::kNo),
                                library.begin_init(ids[1], 2, rank, nccl::Blocking::kNo)};
    const std::span<std::byte> memory = tensor({1, 2});
    for (const int which : {rank, 1 - rank}) {
      library.launch({nccl::Call::Kind::kAllReduce, memory.data(), memory.data(), 2,
                      DataType::kFloat32, nccl::Reduction::kSum, -1},
                     comms[which], stream.get());
    }
  }
  EXPECT_FALSE(gpu_.run_all());
  const std::vector<std::string> faults = gpu_.drain_faults();
  ASSERT_EQ(faults.size(), 1U);
  EXPECT_NE(faults.front().find("wait for each other: rank "), std::string::npos) << faults.front();
}

}  // namespace
}  // namespace hvd::testing
