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

TEST_F(SubmissionCheckTest, AcceptsAnAllreduceAndKeepsTheParametersThatRanksAgreeOn) {
  submission_.input.shape = submission_.output.shape = {2, 3};
  submission_.parameters = Allreduce{.op = ReduceOp::kMax, .prescale = 0.5};
  const wire::Request request = runtime::make_request(submission_, sets_, 1);
  EXPECT_EQ(request.name, "w");
  EXPECT_EQ(request.op, ReduceOp::kMax);
  EXPECT_EQ(request.prescale, 0.5);
  EXPECT_EQ(request.root, 0);
  EXPECT_EQ(request.shape, (std::vector<std::int64_t>{2, 3}));
}

TEST_F(SubmissionCheckTest, CompressesAnAllreduceOfFloat32Only) {
  submission_.parameters = Allreduce{.compression = Compression::kBFloat16};
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).compression, Compression::kBFloat16);
  for (const DataType type : {DataType::kFloat16, DataType::kFloat64, DataType::kInt32}) {
    submission_.input.dtype = submission_.output.dtype = type;
    expect_refused("compression (bfloat16) is for float32, got " + std::string(to_string(type)));
  }
}

// An unchecked request would reach the coordinator as an impossible message, and end the job.
TEST_F(SubmissionCheckTest, RefusesBadGroupsOfJoinAndOfSetsToo) {
  for (const OpKind kind :
       {OpKind::kBarrier, OpKind::kJoin, OpKind::kAddProcessSet, OpKind::kRemoveProcessSet}) {
    submission_.parameters = parameters_of(kind);
    submission_.group = "g";
    submission_.group_size = 2;
    submission_.group_index = 2;
    expect_refused("bad group: member 2 of 2");
    submission_.group_size = submission_.group_index = 0;
    submission_.group.clear();
  }
}

// The request has one form for all kinds. Fields that a kind does not use keep a value that is
// equal on all ranks.
TEST_F(SubmissionCheckTest, ARequestHasTheParametersOfItsKindOnly) {
  const auto request_for = [&](const OperationParameters& parameters) {
    submission_.parameters = parameters;
    submission_.allocate_output = [](const OutputSizes&) { return TensorView{}; };
    return runtime::make_request(submission_, sets_, 1);
  };
  wire::Request plain;
  plain.name = "w";
  plain.shape = {6};
  const auto expect_only = [&](const OperationParameters& parameters, OpKind kind,
                               const std::function<void(wire::Request&)>& also) {
    wire::Request expected = plain;
    expected.kind = kind;
    if (wire::only_agrees(kind)) expected.dtype = DataType::kUInt8, expected.shape = {0};
    also(expected);
    EXPECT_EQ(request_for(parameters), expected) << to_string(kind);
  };
  const auto nothing = [](wire::Request&) {};
  expect_only(Allreduce{ReduceOp::kMin, 2, 3, Compression::kFloat16}, OpKind::kAllreduce,
              [](wire::Request& request) {
                request.op = ReduceOp::kMin;
                request.prescale = 2, request.postscale = 3;
                request.compression = Compression::kFloat16;
              });
  expect_only(Allgather{}, OpKind::kAllgather, nothing);
  expect_only(Broadcast{2}, OpKind::kBroadcast, [](wire::Request& request) { request.root = 2; });
  expect_only(Gather{3}, OpKind::kGather, [](wire::Request& request) { request.root = 3; });
  expect_only(Reduce{ReduceOp::kMax, 2, 3, 1}, OpKind::kReduce, [](wire::Request& request) {
    request.op = ReduceOp::kMax;
    request.prescale = 2, request.postscale = 3;
    request.root = 1;
  });
  expect_only(Scatter{1}, OpKind::kScatter, [](wire::Request& request) { request.root = 1; });
  expect_only(Scatter{2}, OpKind::kScatter, [](wire::Request& request) {
    request.root = 2;
    request.shape = {0};  // this rank's rows are not sent
  });
  expect_only(Alltoall{{1, 2, 3, 0}}, OpKind::kAlltoall,
              [](wire::Request& request) { request.shape = {0}; });
  expect_only(Barrier{}, OpKind::kBarrier, nothing);
  expect_only(Join{}, OpKind::kJoin, nothing);
  expect_only(AddProcessSet{{1, 3}}, OpKind::kAddProcessSet,
              [](wire::Request& request) { request.new_set = {1, 3}; });
  const int set = sets_.add({0, 1});
  expect_only(RemoveProcessSet{set}, OpKind::kRemoveProcessSet,
              [&](wire::Request& request) { request.removed_set = set; });
  submission_.output.shape = {2};
  submission_.output.count = 2;
  submission_.output.data = submission_.input.data + 2 * sizeof(float);
  expect_only(Reducescatter{ReduceOp::kMax, 2, 3}, OpKind::kReducescatter,
              [](wire::Request& request) {
                request.op = ReduceOp::kMax;
                request.prescale = 2, request.postscale = 3;
              });
}

TEST_F(SubmissionCheckTest, RefusesJobWideOperationsOnASetAndSetsThatCannotBeRemoved) {
  const int set = sets_.add({0, 1});
  submission_.parameters = RemoveProcessSet{};
  expect_refused("the set of all ranks cannot be removed");
  submission_.parameters = RemoveProcessSet{7};
  expect_refused("there is no process set 7");
  submission_.parameters = AddProcessSet{{1, 0}};
  expect_refused("expected ranks in ascending order");
  submission_.process_set = set;
  for (const OpKind kind : {OpKind::kJoin, OpKind::kAddProcessSet, OpKind::kRemoveProcessSet}) {
    submission_.parameters = parameters_of(kind);
    expect_refused("it concerns all ranks");
  }
}

TEST_F(SubmissionCheckTest, MembersMakeAndRemoveASetInOperationsOfTheirOwn) {
  submission_.parameters = AddProcessSet{{1, 3}, /*by_members=*/true};
  const wire::Request add = runtime::make_request(submission_, sets_, 1);
  EXPECT_TRUE(add.by_members());
  EXPECT_EQ(add.name, "w [1,3]");
  submission_.name.clear();
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).name, "[1,3]");
  EXPECT_FALSE(runtime::make_request(submission_, sets_, 1).unnamed);
  submission_.name = "w";
  submission_.group = "g";
  submission_.group_size = 1;
  expect_refused("a set that its members make cannot be in a group");
  submission_.group.clear();
  submission_.group_size = 0;
  submission_.parameters = AddProcessSet{{2, 3}, /*by_members=*/true};
  expect_refused("rank 1 is not in the list [2,3]");
  const int of_others = sets_.add({0, 3}, true);
  submission_.parameters = RemoveProcessSet{of_others};
  expect_refused("rank 1 is not in process set 1, which its members made");
  const int own = sets_.add({1, 3}, true);
  submission_.parameters = RemoveProcessSet{own};
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).process_set, own);
}

TEST_F(SubmissionCheckTest, TheLongestNameOfASetFitsIntoAMessage) {
  control::ProcessSetTable sets(1 << 20);
  std::vector<int> ranks;
  for (int rank = (1 << 20) - 32; rank < 1 << 20; ++rank) ranks.push_back(rank);
  submission_.parameters = AddProcessSet{ranks, /*by_members=*/true};
  submission_.name = std::string(3800, 'n');
  const int member = ranks.front();
  EXPECT_LE(runtime::make_request(submission_, sets, member).name.size(), wire::kMaxNameBytes);
  submission_.name += 'n';
  EXPECT_THROW(runtime::make_request(submission_, sets, member), UsageError);
}

TEST_F(SubmissionCheckTest, BitwiseOperationsAreForIntegersAndBoolWithoutFactors) {
  for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    for (const DataType type : {DataType::kInt64, DataType::kUInt8, DataType::kBool}) {
      submission_.input.dtype = submission_.output.dtype = type;
      submission_.parameters = Allreduce{.op = op};
      EXPECT_EQ(runtime::make_request(submission_, sets_, 1).op, op);
      submission_.parameters = Allreduce{.op = op, .postscale = 2};
      expect_refused(std::string(to_string(op)) + " has no factors");
    }
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat64}) {
      submission_.input.dtype = submission_.output.dtype = type;
      for (const OperationParameters& parameters :
           {OperationParameters(Allreduce{.op = op}), OperationParameters(Reduce{.op = op}),
            OperationParameters(Reducescatter{.op = op})}) {
        submission_.parameters = parameters;
        expect_refused(std::string(to_string(op)) + " is for integers and bool, got " +
                       std::string(to_string(type)));
      }
    }
  }
}

TEST_F(SubmissionCheckTest, ChecksTheRootAndMemoryOfAReduceAndAScatter) {
  submission_.parameters = Reduce{.root = 4};
  expect_refused("root rank 4 is not in process set 0");
  submission_.parameters = Scatter{4};
  submission_.allocate_output = [](const OutputSizes&) { return TensorView{}; };
  expect_refused("root rank 4 is not in process set 0");
  submission_.input.data = nullptr;
  submission_.parameters = Scatter{1};
  expect_refused("the input has no memory");
  submission_.parameters = Scatter{0};
  EXPECT_NO_THROW(runtime::make_request(submission_, sets_, 1)) << "only the root's is read";
  submission_.allocate_output = nullptr;
  expect_refused("allocate_output must be set");
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
  submission_.parameters = Broadcast{4};
  expect_refused("root rank 4 is not in process set 0");
  submission_.parameters = Gather{-1};
  expect_refused("destination rank -1 is not in process set 0");
}

TEST_F(SubmissionCheckTest, RefusesAnAverageOfBool) {
  submission_.input.dtype = submission_.output.dtype = DataType::kBool;
  submission_.parameters = Allreduce{.op = ReduceOp::kAverage};
  expect_refused("an average of bool");
}

TEST_F(SubmissionCheckTest, RefusesAScalarToGather) {
  submission_.parameters = Allgather{};
  submission_.input.shape = {};
  submission_.input.count = 1;
  expect_refused("a scalar has no first dimension");
}

TEST_F(SubmissionCheckTest, RefusesRowsOfMoreElementsThanCanBeCounted) {
  submission_.parameters = Allgather{};
  submission_.input.shape = {0, std::int64_t{1} << 40, std::int64_t{1} << 40};
  submission_.input.count = 0;
  expect_refused("bad shape");
}

TEST_F(SubmissionCheckTest, RefusesBadSplits) {
  submission_.parameters = Alltoall{};
  expect_refused("expected 4 splits, one per member, got 0");
  submission_.parameters = Alltoall{{1, 2, 3, 1}};
  expect_refused("the splits [1,2,3,1] add up to 7 rows, expected 6");
  submission_.parameters = Alltoall{{8, -2, 0, 0}};
  expect_refused("bad splits [8,-2,0,0]");
  submission_.parameters = Alltoall{{1, 2, 3, 0}};
  expect_refused("allocate_output must be set");
  submission_.allocate_output = [](const OutputSizes&) { return TensorView{}; };
  EXPECT_EQ(runtime::make_request(submission_, sets_, 1).shape, (std::vector<std::int64_t>{0}));
}

TEST_F(SubmissionCheckTest, RefusesAdasumOfIntegers) {
  submission_.parameters = Allreduce{.op = ReduceOp::kAdasum};
  submission_.input.dtype = submission_.output.dtype = DataType::kInt32;
  expect_refused("Adasum is for floating types, got int32");
}

TEST_F(SubmissionCheckTest, RefusesAnOutputOfAReducescatterThatIsNotItsShare) {
  submission_.parameters = Reducescatter{};
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

TEST_F(SubmissionCheckTest, AcceptsOnlyTheRowsOfAReducescatterThatNoOtherRankReads) {
  std::vector<float> memory(12);  // 6 rows; of 4 ranks, this one gets rows 2 and 3
  submission_.parameters = Reducescatter{};
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

class PartsCheckTest : public SubmissionCheckTest {
 protected:
  PartsCheckTest() {
    submission_.input.device = submission_.output.device = {DeviceType::kCuda, 0};
    submission_.input.data = submission_.output.data = nullptr;
    submission_.parts = parts_;
  }
  void expect_refused(const std::string& why) {
    submission_.parts = parts_;
    try {
      runtime::make_request(submission_, sets_, 1, 0);
      ADD_FAILURE() << "accepted; expected: " << why;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  }
  std::byte* memory() { return reinterpret_cast<std::byte*>(memory_.data()); }

  std::vector<TensorPart> parts_ = {{memory(), 1, 2}, {nullptr, 3, 0}, {memory() + 16, 4, 2}};
};

TEST_F(PartsCheckTest, TravelAsAGroupOfOne) {
  const wire::Request request = runtime::make_request(submission_, sets_, 1, 0);
  EXPECT_EQ(request.group_size, 1);
  EXPECT_EQ(request.group, "w");
  EXPECT_EQ(request.shape, (std::vector<std::int64_t>{6}));
}

TEST_F(PartsCheckTest, LieOneBehindTheOtherWithinTheTensor) {
  const std::vector<TensorPart> good = parts_;
  const std::vector<TensorPart> bad[] = {{{memory(), 1, 2}, {memory(), 2, 2}},
                                         {{memory(), 4, 2}, {memory(), 0, 2}},
                                         {{memory(), 5, 2}},
                                         {{memory(), -1, 2}},
                                         {{memory(), 2, -1}},
                                         {{memory(), 9, 0}},
                                         {{nullptr, 1, 2}}};
  for (const std::vector<TensorPart>& parts : bad) {
    parts_ = parts;
    expect_refused("lie one behind the other within the 6 elements");
  }
}

TEST_F(PartsCheckTest, AreOfAnAllreduceOnAGpu) {
  const Submission good = submission_;
  submission_.parameters = Broadcast{};
  expect_refused("only an allreduce");
  submission_.parameters = Allreduce{.op = ReduceOp::kAdasum};
  expect_refused("not Adasum");
  submission_ = good;
  submission_.input.device = submission_.output.device = {};
  expect_refused("of a GPU's tensor");
  submission_ = good;
  submission_.group = "g";
  submission_.group_size = 1;
  expect_refused("cannot be a member of a group");
  submission_ = good;
  submission_.output.data = memory();
  expect_refused("expected null for input and output");
}

TEST_F(PartsCheckTest, AreTheSameOperationAtAnyAddress) {
  const wire::Request request = runtime::make_request(submission_, sets_, 1, 0);
  Submission again = submission_;
  const std::vector<TensorPart> others = {{memory() + 4, 0, 1}};
  again.parts = others;
  EXPECT_TRUE(runtime::is_same_operation(again, submission_, request));
  const std::vector<TensorPart> outside = {{memory(), 0, 7}};
  again.parts = outside;
  EXPECT_FALSE(runtime::is_same_operation(again, submission_, request));
  again.parts = {};
  EXPECT_FALSE(runtime::is_same_operation(again, submission_, request)) << "it has no memory";
  again.input.data = again.output.data = memory();
  EXPECT_FALSE(runtime::is_same_operation(again, submission_, request))
      << "the other ranks submit it in parts";
}

// The address of the last result does not matter.
TEST_F(SubmissionCheckTest, AnAllgatherIsTheSameOperationWithAnyResultAddress) {
  submission_.parameters = Allgather();
  submission_.output = {};
  submission_.allocate_output = [](const OutputSizes&) { return TensorView(); };
  const wire::Request request = runtime::make_request(submission_, sets_, 1);
  Submission before = submission_;
  before.output = before.input;
  before.output.shape = {24};
  before.output.count = 24;
  before.allocate_output = nullptr;  // the function is called only once
  EXPECT_TRUE(runtime::is_same_operation(submission_, before, request));
  Submission other = submission_;
  other.input.shape = {2, 3};
  EXPECT_FALSE(runtime::is_same_operation(other, before, request));
  other = submission_;
  other.allocate_output = nullptr;
  EXPECT_FALSE(runtime::is_same_operation(other, before, request));
}

TEST_F(SubmissionCheckTest, RefusesInfiniteFactors) {
  submission_.parameters = Allreduce{.postscale = std::nan("")};
  expect_refused("expected finite scale factors");
  submission_.parameters = Reducescatter{.prescale = INFINITY};
  expect_refused("expected finite scale factors");
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
