// Process sets of one rank on a GPU need no communicator, no packing and no copy through the host.
#include <gtest/gtest.h>

#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

class DeviceSelfTest : public ::testing::TestWithParam<Path> {
 protected:
  DeviceSelfTest() : job_(1, GetParam()) {}

  static FloatOperation sum(DeviceJob& job, int rank, const std::string& name, const Floats& values,
                            const Allreduce& how = {}) {
    FloatOperation made =
        FloatOperation::in_place(job, rank, name, OpKind::kAllreduce, DataType::kFloat32, values);
    made.submission.parameters = how;
    return made;
  }
  /// Submits the operations together and waits for them. @return the device calls that they caused
  FakeGpuCounts run(const std::vector<FloatOperation>& operations) {
    const FakeGpuCounts before = job_.gpu().counts(0);
    std::vector<Submission> submissions;
    for (const FloatOperation& one : operations) submissions.push_back(one.submission);
    EXPECT_TRUE(job_.run(job_.runtime(0).submit(std::move(submissions), Progress::kBackground)));
    FakeGpuCounts counts = job_.gpu().counts(0);
    counts.launches -= before.launches;
    counts.copies -= before.copies;
    return counts;
  }
  Floats result(const FloatOperation& one) { return job_.read<float>(0, *one.output, *one.ready); }
  /// Checks that no communicator, buffer or host memory was used.
  void expect_no_detours() {
    const FakeGpuCounts counts = job_.gpu().counts(0);
    EXPECT_EQ(counts.made, 0) << "buffers for packing";
    EXPECT_EQ(counts.pinned_made, 0);
    EXPECT_EQ(counts.copies_to_host, 0);
    EXPECT_EQ(job_.nccl().counts(0).inits, 0);
    job_.expect_no_faults();
  }

  DeviceJob job_;
};

INSTANTIATE_TEST_SUITE_P(Paths, DeviceSelfTest, ::testing::Values(Path::kNccl, Path::kStaged),
                         [](const auto& test) {
                           return test.param == Path::kNccl ? "Nccl" : "Staged";
                         });

TEST_P(DeviceSelfTest, AllreducesInPlaceWithoutWork) {
  for (const ReduceOp op :
       {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kProduct}) {
    const Allreduce how{.op = op};
    const std::string name(to_string(op));
    const std::vector<FloatOperation> gradients = {sum(job_, 0, name + "a", {1, 2, 3}, how),
                                                   sum(job_, 0, name + "b", Floats(1000, 4), how)};
    const FakeGpuCounts counts = run(gradients);
    EXPECT_EQ(counts.copies, 0);
    EXPECT_EQ(counts.launches, 0);
    EXPECT_EQ(result(gradients[0]), (Floats{1, 2, 3}));
    EXPECT_EQ(result(gradients[1]), Floats(1000, 4));
  }
  expect_no_detours();
}

TEST_P(DeviceSelfTest, AllreducesATensorInPartsWithoutPacking) {
  auto [tensor, event] = job_.make<float>(0, {1, 2, 3, 4});
  const std::vector<TensorPart> parts = {{tensor.memory, 0, 2},
                                         {tensor.memory + 2 * sizeof(float), 5, 2}};
  const auto reduce = [&, ready = event](const std::string& name, double prescale) {
    Submission submission;
    submission.name = name;
    submission.parameters = Allreduce{.op = ReduceOp::kAverage, .prescale = prescale};
    submission.input =
        submission.output = {nullptr, 7, DataType::kFloat32, {DeviceType::kCuda, 0}, {7}};
    submission.parts = parts;
    submission.input_ready = ready;
    EventPtr done;
    submission.on_done = [&done](const Status& status, const EventPtr& output_ready) {
      EXPECT_TRUE(status.ok()) << status.message;
      done = output_ready;
    };
    EXPECT_TRUE(job_.run({submit_one(job_.runtime(0), submission)}));
    return done;
  };
  EXPECT_EQ(reduce("as it is", 1), event) << "no work is queued behind the gradient";
  const FakeGpuCounts before = job_.gpu().counts(0);
  const EventPtr scaled = reduce("scaled", 3);
  EXPECT_EQ(job_.gpu().counts(0).launches - before.launches, 2);
  EXPECT_EQ(job_.read<float>(0, tensor.view(DataType::kFloat32), scaled), (Floats{3, 6, 9, 12}));
  expect_no_detours();
}

TEST_P(DeviceSelfTest, AppliesFactorsOnTheDevice) {
  const Allreduce how{.op = ReduceOp::kAverage, .prescale = 3, .postscale = 0.5};
  const std::vector<FloatOperation> one = {sum(job_, 0, "scaled", {2, 4}, how)};
  const FakeGpuCounts counts = run(one);
  EXPECT_EQ(counts.launches, 1);
  EXPECT_EQ(counts.copies, 0);
  EXPECT_EQ(result(one[0]), (Floats{3, 6}));
  expect_no_detours();
}

TEST_P(DeviceSelfTest, CopiesIntoAnotherTensorOnTheDevice) {
  FloatOperation one = sum(job_, 0, "copied", Floats(3));
  auto [input, event] = job_.make<float>(0, {1, 2, 3});
  one.submission.input = input.view(DataType::kFloat32);
  one.submission.input_ready = event;
  const FakeGpuCounts counts = run({one});
  EXPECT_EQ(counts.copies, 1);
  EXPECT_EQ(counts.launches, 0);
  EXPECT_EQ(result(one), (Floats{1, 2, 3}));
  expect_no_detours();
}

TEST_P(DeviceSelfTest, DoesNotCastBecauseTheTensorIsNotSent) {
  const Allreduce how{.compression = Compression::kBFloat16};
  const std::vector<FloatOperation> one = {sum(job_, 0, "exact", {1.0F + 0x1p-20F}, how)};
  EXPECT_EQ(run(one).launches, 0);
  EXPECT_EQ(result(one[0]), (Floats{1.0F + 0x1p-20F}));
  expect_no_detours();
}

TEST_P(DeviceSelfTest, MovesRowsOfEveryKind) {
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReducescatter, OpKind::kAllgather,
                            OpKind::kGather, OpKind::kScatter, OpKind::kAlltoall}) {
    const bool gathers = kind != OpKind::kBroadcast && kind != OpKind::kReducescatter;
    const std::string name(to_string(kind));
    FloatOperation one =
        gathers ? FloatOperation::gathering(job_, 0, name, kind, DataType::kFloat32, {1, 2, 3})
                : FloatOperation::in_place(job_, 0, name, kind, DataType::kFloat32, {1, 2, 3});
    if (kind == OpKind::kAlltoall) std::get<Alltoall>(one.submission.parameters).splits = {3};
    run({one});
    EXPECT_EQ(result(one), (Floats{1, 2, 3})) << name;
  }
  expect_no_detours();
}

// The device scales floating types only.
TEST_P(DeviceSelfTest, ScalesIntegersThroughTheHost) {
  auto one = DeviceOperation<std::int32_t>::in_place(job_, 0, "integers", OpKind::kAllreduce,
                                                     DataType::kInt32, {1, 2, 3});
  allreduce_of(one.submission).prescale = 2;
  ASSERT_TRUE(job_.run({submit_one(job_.runtime(0), one.submission)}));
  EXPECT_EQ(job_.read<std::int32_t>(0, *one.output, *one.ready),
            (std::vector<std::int32_t>{2, 4, 6}));
  EXPECT_EQ(job_.gpu().counts(0).copies_to_host, 1);
  job_.expect_no_faults();
}

TEST_P(DeviceSelfTest, ASetOfOneInALargerJobHasNoCommunicator) {
  DeviceJob job(2, GetParam());
  const Submission add{.parameters = AddProcessSet{{1}}};
  const std::vector<Operation> added = {submit_one(job.runtime(0), add),
                                        submit_one(job.runtime(1), add)};
  ASSERT_TRUE(job.run(added));
  FloatOperation one = sum(job, 1, "own", {1, 2});
  one.submission.process_set = static_cast<int>(added[0].result());
  ASSERT_TRUE(job.run({submit_one(job.runtime(1), one.submission)}));
  EXPECT_EQ(job.read<float>(1, *one.output, *one.ready), (Floats{1, 2}));
  EXPECT_EQ(job.nccl().counts(1).inits, 0);
  EXPECT_EQ(job.gpu().counts(1).copies_to_host, 0);
  job.expect_no_faults();
}

}  // namespace
}  // namespace hvd::testing
