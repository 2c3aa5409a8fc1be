#include "negotiation/validator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

std::string mismatch(const wire::Request& a, int rank_a, const wire::Request& b, int rank_b) {
  return find_mismatch(a, rank_a, b, rank_b).value_or("(none)");
}

TEST(Validator, TheTextGivesBothValuesAndBothRanks) {
  EXPECT_EQ(mismatch(allreduce("fc1.weight", {128, 64}), 0, allreduce("fc1.weight", {128, 32}), 3),
            "allreduce 'fc1.weight': shape differs: rank 0 [128,64], rank 3 [128,32]; every rank "
            "must submit the same shape");
}

TEST(Validator, TheLowerRankComesFirstWhateverTheOrder) {
  const std::string text = mismatch(allreduce("a", {1}), 2, allreduce("a", {2}), 5);
  EXPECT_EQ(mismatch(allreduce("a", {2}), 5, allreduce("a", {1}), 2), text);
  EXPECT_EQ(text,
            "allreduce 'a': shape differs: rank 2 [1], rank 5 [2]; every rank must submit the same "
            "shape");
}

TEST(Validator, ComparesEachField) {
  const std::vector<std::pair<std::function<void(wire::Request&)>, std::string>> cases = {
      {[](auto& r) { r.kind = OpKind::kBroadcast; },
       "kind of operation differs: rank 0 allreduce, rank 1 broadcast"},
      {[](auto& r) { r.dtype = DataType::kFloat16; },
       "dtype differs: rank 0 float32, rank 1 float16"},
      {[](auto& r) { r.compression = Compression::kFloat16; },
       "compression differs: rank 0 none, rank 1 float16"},
      {[](auto& r) { r.shape = {}; }, "shape differs: rank 0 [4], rank 1 []"},
      {[](auto& r) { r.op = ReduceOp::kMin; }, "op differs: rank 0 sum, rank 1 min"},
      {[](auto& r) { r.prescale = 0.5; }, "prescale factor differs: rank 0 1, rank 1 0.5"},
      {[](auto& r) { r.postscale = 3; }, "postscale factor differs: rank 0 1, rank 1 3"},
      {[](auto& r) { r.prescale = std::nan(""); }, "prescale factor differs: rank 0 1, rank 1 nan"},
      {[](auto& r) { r.device = DeviceType::kCuda; }, "device differs: rank 0 cpu, rank 1 cuda"},
      {[](auto& r) { r = in_group(r, "g", 2, 1); },
       "group differs: rank 0 none, rank 1 'g' of 2, member 1"},
  };
  for (const auto& [change, difference] : cases) {
    wire::Request other = allreduce("a");
    change(other);
    const std::string what = difference.substr(0, difference.find(" differs"));
    EXPECT_EQ(mismatch(allreduce("a"), 0, other, 1),
              "allreduce 'a': " + difference + "; every rank must submit the same " + what);
  }
  EXPECT_EQ(mismatch(allreduce("a"), 0, allreduce("a"), 1), "(none)");
}

std::string misplanned(const wire::Request& planned, const wire::Request& submitted) {
  return find_misplanned(planned, submitted, 3).value_or("(none)");
}

TEST(Validator, APlannedRequestEqualsTheSubmittedOne) {
  EXPECT_EQ(misplanned(allreduce("a"), allreduce("a")), "(none)");
  EXPECT_EQ(
      misplanned(allreduce("a", {1048576}), allreduce("a", {4})),
      "allreduce 'a' on rank 3: the plan has another shape than this rank submitted: expected "
      "[4], got [1048576]; run the same build of hvd on every rank");
  const std::vector<std::pair<std::function<void(wire::Request&)>, std::string>> cases = {
      {[](auto& r) { r.kind = OpKind::kBroadcast; }, "kind of operation"},
      {[](auto& r) { r.dtype = DataType::kFloat16; }, "dtype"},
      {[](auto& r) { r.compression = Compression::kFloat16; }, "compression"},
      {[](auto& r) { r.op = ReduceOp::kMin; }, "op"},
      {[](auto& r) { r.prescale = 0.5; }, "prescale factor"},
      {[](auto& r) { r.device = DeviceType::kCuda; }, "device"},
      {[](auto& r) { r = in_group(r, "g", 2, 1); }, "group"},
  };
  for (const auto& [change, what] : cases) {
    wire::Request planned = allreduce("a");
    change(planned);
    EXPECT_NE(misplanned(planned, allreduce("a")).find("another " + what + " than"),
              std::string::npos)
        << what;
  }
}

// A plan is expanded to the rows of the rank that runs it, except for an alltoall.
TEST(Validator, APlannedRequestHasTheRowsOfThisRank) {
  wire::Request submitted = allreduce("a", {2, 3});
  wire::Request planned = allreduce("a", {5, 3});
  planned.kind = submitted.kind = OpKind::kAllgather;
  EXPECT_NE(misplanned(planned, submitted).find("expected [2,3], got [5,3]"), std::string::npos);
  planned.kind = submitted.kind = OpKind::kAlltoall;
  EXPECT_EQ(misplanned(planned, submitted), "(none)");
  planned.kind = submitted.kind = OpKind::kJoin;
  planned.shape = submitted.shape = {};
  planned.last_to_join = 1;
  EXPECT_EQ(misplanned(planned, submitted), "(none)") << "only a plan has it";
}

TEST(Validator, ComparesGroupNameSizeAndPlace) {
  const wire::Request reference = in_group(allreduce("a"), "g", 3, 1);
  EXPECT_EQ(mismatch(reference, 0, reference, 1), "(none)");
  EXPECT_NE(mismatch(reference, 0, in_group(allreduce("a"), "h", 3, 1), 1), "(none)");
  EXPECT_NE(mismatch(reference, 0, in_group(allreduce("a"), "g", 4, 1), 1), "(none)");
  EXPECT_NE(mismatch(reference, 0, in_group(allreduce("a"), "g", 3, 2), 1), "(none)");
  EXPECT_NE(mismatch(in_group(unnamed(OpKind::kAllreduce, 4), "", 3, 1), 0,
                     in_group(unnamed(OpKind::kAllreduce, 5), "", 3, 1), 1),
            "(none)");
}

TEST(Validator, ABroadcastHasARootAndNoOp) {
  wire::Request a = allreduce("a");
  a.kind = OpKind::kBroadcast;
  wire::Request b = a;
  b.op = ReduceOp::kMax;
  EXPECT_EQ(mismatch(a, 0, b, 1), "(none)");
  b.root = 1;
  EXPECT_EQ(
      mismatch(a, 0, b, 1),
      "broadcast 'a': root differs: rank 0 uses rank 0, rank 1 uses rank 1; every rank must submit "
      "the same root");
}

TEST(Validator, FirstDimensionsOfAnAllgatherMayDiffer) {
  EXPECT_EQ(mismatch(allgather("a", {2, 3}), 0, allgather("a", {0, 3}), 1), "(none)");
  EXPECT_EQ(mismatch(allgather("a", {2, 3}), 0, allgather("a", {5, 4}), 1),
            "allgather 'a': shape after the first dimension differs: rank 0 [2,3], rank 1 [5,4]; "
            "every rank must submit the same shape after the first dimension");
  EXPECT_NE(mismatch(allgather("a", {2, 3}), 0, allgather("a", {2}), 1), "(none)");
}

TEST(Validator, AgreesOnNotANumber) {
  wire::Request a = allreduce("a");
  a.prescale = std::nan("");
  EXPECT_EQ(mismatch(a, 0, a, 1), "(none)");
}

TEST(Validator, FindsRequestsThatNoRankMayMake) {
  EXPECT_EQ(find_fault(allgather("a", {}), {0, 1}, {}),
            "allgather 'a': a scalar has no first dimension; reshape it to [1]");
  wire::Request request = allreduce("b");
  request.kind = OpKind::kBroadcast;
  request.root = 2;
  EXPECT_EQ(
      find_fault(request, {0, 1}, {}),
      "broadcast 'b': root rank 2 is not in process set 0; a root is a world rank of a member");
  EXPECT_EQ(find_fault(request, {0, 2}, {}), std::nullopt);
  EXPECT_EQ(find_fault(allreduce("c", {}), {0, 1}, {}), std::nullopt);
}

TEST(Validator, BytesOfAnAllgatherStopAtTheLargestNumber) {
  constexpr auto kMaxInt64 = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(gathered_bytes(allgather("a", {2, 3}), {2, 5}), 7 * 3 * 4);
  EXPECT_EQ(gathered_bytes(allgather("a", {1}), {kMaxInt64, kMaxInt64}), kMaxInt64);
  EXPECT_EQ(gathered_bytes(allgather("a", {0, std::int64_t{1} << 62, 4}), {0, 1}), kMaxInt64);
  EXPECT_EQ(gathered_bytes(allgather("a", {0, std::int64_t{1} << 62, 4}), {0, 0}), 0);
}

}  // namespace
}  // namespace hvd::control
