#include "engine/submission_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hvd/error.h"
#include "support/job_helpers.h"

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

class SubmissionCheckTest : public ::testing::Test {
 protected:
  SubmissionCheckTest() : submission_(float_operation(memory_, "w")) {}
  void expect_refused(const std::string& why) const {
    try {
      runtime::make_request(submission_, sets_, 1);
      ADD_FAILURE() << "accepted; expected: " << why;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(why));
      EXPECT_THAT(error.what(), HasSubstr("'w'"));
    }
  }
  control::ProcessSetTable sets_{4};
  std::vector<float> memory_ = std::vector<float>(6);
  Submission submission_;
};

TEST_F(SubmissionCheckTest, AcceptsAnAllreduceAndKeepsWhatRanksMustAgreeOn) {
  submission_.input.shape = submission_.output.shape = {2, 3};
  submission_.op = ReduceOp::kMax;
  submission_.prescale = 0.5;
  submission_.root = 3;  // means nothing for an allreduce
  const wire::Request request = runtime::make_request(submission_, sets_, 1);
  EXPECT_EQ(request.name, "w");
  EXPECT_EQ(request.op, ReduceOp::kMax);
  EXPECT_EQ(request.prescale, 0.5);
  EXPECT_EQ(request.root, 0);
  EXPECT_EQ(request.shape, (std::vector<std::int64_t>{2, 3}));
}

TEST_F(SubmissionCheckTest, CompressesAnAllreduceOfFloat32AndNothingElse) {
  submission_.compression = Compression::kBFloat16;
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).compression, Compression::kBFloat16);
  for (const DataType type : {DataType::kFloat16, DataType::kFloat64, DataType::kInt32}) {
    submission_.input.dtype = submission_.output.dtype = type;
    expect_refused("compression (bfloat16) is for float32, got " + std::string(to_string(type)));
  }
  submission_.input.dtype = submission_.output.dtype = DataType::kFloat32;
  submission_.kind = OpKind::kReducescatter;
  expect_refused("compression (bfloat16) is for allreduce");
}

// What goes on to the coordinator unchecked ends the job there, as a message that cannot be.
TEST_F(SubmissionCheckTest, RefusesCompressionAndBadGroupsOfJoinAndOfSetsToo) {
  submission_.splits = {0, 1};
  for (const OpKind kind :
       {OpKind::kBarrier, OpKind::kJoin, OpKind::kAddProcessSet, OpKind::kRemoveProcessSet}) {
    submission_.kind = kind;
    submission_.compression = Compression::kBFloat16;
    expect_refused("compression (bfloat16) is for allreduce");
    submission_.compression = Compression::kNone;
    submission_.group = "g";
    submission_.group_size = 2;
    submission_.group_index = 2;
    expect_refused("bad group: member 2 of 2");
    submission_.group_size = submission_.group_index = 0;
    submission_.group.clear();
  }
}

TEST_F(SubmissionCheckTest, RefusesMoreBytesThanCanBeCounted) {
  submission_.input.shape = submission_.output.shape = {std::int64_t{1} << 61};
  submission_.input.count = submission_.output.count = std::int64_t{1} << 61;
  expect_refused("bad shape");
}

TEST_F(SubmissionCheckTest, RefusesAnUnknownSet) {
  submission_.process_set = 9;
  expect_refused("there is no process set 9");
}

TEST_F(SubmissionCheckTest, RefusesARootOutsideTheSet) {
  submission_.kind = OpKind::kBroadcast;
  submission_.root = 4;
  expect_refused("root rank 4 is not in process set 0");
}

TEST_F(SubmissionCheckTest, RefusesAnAverageOfBool) {
  submission_.input.dtype = submission_.output.dtype = DataType::kBool;
  submission_.op = ReduceOp::kAverage;
  expect_refused("an average of bool");
}

TEST_F(SubmissionCheckTest, RefusesAScalarToGather) {
  submission_.kind = OpKind::kAllgather;
  submission_.input.shape = {};
  submission_.input.count = 1;
  expect_refused("a scalar has no first dimension");
}

TEST_F(SubmissionCheckTest, RefusesRowsOfMoreElementsThanCanBeCounted) {
  submission_.kind = OpKind::kAllgather;
  submission_.input.shape = {0, std::int64_t{1} << 40, std::int64_t{1} << 40};
  submission_.input.count = 0;
  expect_refused("bad shape");
}

TEST_F(SubmissionCheckTest, RefusesBadSplits) {
  submission_.kind = OpKind::kAlltoall;
  expect_refused("expected 4 splits, one per member, got 0");
  submission_.splits = {1, 2, 3, 1};
  expect_refused("the splits [1,2,3,1] add up to 7 rows, expected 6");
  submission_.splits = {8, -2, 0, 0};
  expect_refused("bad splits [8,-2,0,0]");
  submission_.splits = {1, 2, 3, 0};
  expect_refused("allocate_output must be set");
  submission_.allocate_output = [](const OutputSizes&) { return TensorView{}; };
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).shape, (std::vector<std::int64_t>{0}));
}

TEST_F(SubmissionCheckTest, RefusesAdasumOfIntegers) {
  submission_.op = ReduceOp::kAdasum;
  submission_.input.dtype = submission_.output.dtype = DataType::kInt32;
  expect_refused("Adasum is for floating types, got int32");
}

TEST_F(SubmissionCheckTest, RefusesAnOutputOfAReducescatterThatIsNotItsShare) {
  submission_.kind = OpKind::kReducescatter;
  expect_refused("the output has 6 elements of float32, expected 2 of float32");
}

TEST_F(SubmissionCheckTest, RefusesAShapeThatDoesNotFitTheView) {
  submission_.input.shape = {7};
  expect_refused("the shape [7] has 7 elements, the view 6");
}

TEST_F(SubmissionCheckTest, RefusesAnOutputOfAnotherSize) {
  submission_.output.count = 5;
  expect_refused("the output has 5 elements of float32, expected 6 of float32");
}

TEST_F(SubmissionCheckTest, RefusesAnOutputThatOverlapsTheInput) {
  std::vector<float> memory(9);
  submission_.input.data = reinterpret_cast<std::byte*>(memory.data());
  submission_.output.data = submission_.input.data + sizeof(float);
  expect_refused("the output overlaps the input; expected the same memory or none in common");
  std::swap(submission_.input.data, submission_.output.data);
  expect_refused("the output overlaps the input");
  submission_.output.data = submission_.input.data;
  EXPECT_NO_THROW(runtime::make_request(submission_, sets_, 1));
}

TEST_F(SubmissionCheckTest, TakesOnlyTheRowsOfAReducescatterThatNobodyElseReads) {
  std::vector<float> memory(12);  // 6 rows; of 4 ranks, this one gets rows 2 and 3
  submission_.kind = OpKind::kReducescatter;
  submission_.input.data = reinterpret_cast<std::byte*>(memory.data());
  submission_.input.shape = {6, 2};
  submission_.input.count = 12;
  submission_.output.shape = {2, 2};
  submission_.output.count = 4;
  submission_.output.data = submission_.input.data;
  expect_refused("expected the rows of it that this rank gets, from row 2 on");
  submission_.output.data = submission_.input.data + 4 * sizeof(float);
  EXPECT_NO_THROW(runtime::make_request(submission_, sets_, 1));
  std::vector<float> elsewhere(4);
  submission_.output.data = reinterpret_cast<std::byte*>(elsewhere.data());
  EXPECT_NO_THROW(runtime::make_request(submission_, sets_, 1));
}

TEST_F(SubmissionCheckTest, RefusesInfiniteFactors) {
  submission_.postscale = std::nan("");
  expect_refused("not finite");
}

TEST_F(SubmissionCheckTest, RefusesTensorsOnDevicesWithoutABackend) {
  submission_.input.device = {DeviceType::kCuda, 0};
  expect_refused("the tensor is on cuda");
}

TEST_F(SubmissionCheckTest, RefusesAHalfNamedGroup) {
  submission_.group_size = 2;
  expect_refused("all named or all unnamed");
}

}  // namespace
}  // namespace hvd::testing
