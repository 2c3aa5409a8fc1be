// Allreduces of fp32 that are sent as 16 bits, on the host. The runtime casts while it packs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"
#include "support/reference.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Submission compressed(std::vector<float>& memory, const std::string& name,
                      Compression compression) {
  Submission submission = float_operation(memory, name);
  allreduce_of(submission).compression = compression;
  return submission;
}

class Job {
 public:
  explicit Job(int size) : job_(stepped(size), clock_) {}
  runtime::Runtime& rank(int number) { return job_.rank(number); }
  void submit(int number, std::vector<Submission> submissions) {
    for (Operation& operation :
         job_.rank(number).submit(std::move(submissions), Progress::kBackground))
      operations_.push_back(std::move(operation));
  }
  /// Runs until all submitted operations have ended, and returns them.
  std::vector<Operation> run() {
    EXPECT_TRUE(job_.run_until(clock_, seconds(10), [this] {
      return std::all_of(operations_.begin(), operations_.end(),
                         [](const Operation& operation) { return operation.done(); });
    })) << "an operation hangs";
    return std::exchange(operations_, {});
  }
  void expect_all_ok() {
    for (const Operation& operation : run())
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  }
  /// Submits a join on the rank, and steps the job until the other ranks have received it.
  void join(int number) {
    joined_.push_back(submit_one(job_.rank(number), join_operation()));
    for (int i = 0; i < 200; ++i) job_.step_all();
  }

 private:
  static LocalJobOptions stepped(int ranks) {
    LocalJobOptions options;
    options.size = ranks;
    options.runtime.background_thread = false;
    return options;
  }
  VirtualClock clock_;
  LocalJob job_;
  std::vector<Operation> operations_;
  std::vector<Operation> joined_;
};

std::vector<float> floats(const Bytes& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class CompressedAllreduce
    : public ::testing::TestWithParam<std::tuple<Compression, ReduceOp, int>> {};
INSTANTIATE_TEST_SUITE_P(
    Forms, CompressedAllreduce,
    ::testing::Combine(::testing::Values(Compression::kFloat16, Compression::kBFloat16),
                       ::testing::Values(ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin,
                                         ReduceOp::kMax, ReduceOp::kProduct),
                       ::testing::Values(1, 2, 3, 4)),
    [](const auto& form) {
      return std::string(to_string(std::get<0>(form.param))) + "_" +
             std::string(to_string(std::get<1>(form.param))) +
             std::to_string(std::get<2>(form.param));
    });

TEST_P(CompressedAllreduce, IsTheReferenceBitForBitFusedAndAlone) {
  const auto [compression, op, size] = GetParam();
  const std::vector<std::int64_t> counts = {0, 1, 7, 1000, 1023, 5001};
  for (const double postscale : {1.0, 0.3, -3.0}) {
    Job job(size);
    std::vector<std::vector<Bytes>> inputs(counts.size());
    std::vector<std::vector<std::vector<float>>> sent(counts.size()), received(counts.size());
    for (int rank = 0; rank < size; ++rank) {
      std::vector<Submission> submissions;
      for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
        inputs[tensor].push_back(make_input(counts[tensor], DataType::kFloat32, op, rank, tensor));
        auto& from = sent[tensor].emplace_back(floats(inputs[tensor].back()));
        auto& to = received[tensor].emplace_back(from.size());
        Submission submission = compressed(from, "t" + std::to_string(tensor), compression);
        if (tensor % 2 == 0) submission.output = float_operation(to, "").output;
        allreduce_of(submission).op = op;
        allreduce_of(submission).prescale = 0.7;
        allreduce_of(submission).postscale = postscale;
        submission.alone = tensor > 3;
        submissions.push_back(std::move(submission));
      }
      job.submit(rank, std::move(submissions));
    }
    job.expect_all_ok();
    EXPECT_EQ(job.rank(0).metrics().backend_calls, 3U) << "one batch, and two by themselves";
    for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
      const Bytes expected = reference_compressed(inputs[tensor], compression, op, 0.7, postscale);
      for (int rank = 0; rank < size; ++rank) {
        const auto number = static_cast<std::size_t>(rank);
        const auto& result = tensor % 2 == 0 ? received[tensor][number] : sent[tensor][number];
        EXPECT_EQ(first_difference(reinterpret_cast<const std::byte*>(result.data()), expected,
                                   DataType::kFloat32),
                  -1)
            << "rank " << rank << ", tensor " << tensor << ", postscale " << postscale;
        const bool in_place = tensor % 2 != 0;
        EXPECT_TRUE(in_place || sent[tensor][number] == floats(inputs[tensor][number]))
            << "the input stays";
      }
    }
  }
}

TEST(Compressed, FactorsAreAppliedWhereTheyDoNotOverflow) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto reduce = [](std::vector<float> values, ReduceOp op, double prescale,
                         double postscale) {
    Job job(2);
    std::vector<std::vector<float>> data = {values, values};
    for (int rank = 0; rank < 2; ++rank) {
      Submission submission =
          compressed(data[static_cast<std::size_t>(rank)], "x", Compression::kFloat16);
      allreduce_of(submission).op = op;
      allreduce_of(submission).prescale = prescale;
      allreduce_of(submission).postscale = postscale;
      job.submit(rank, {submission});
    }
    job.expect_all_ok();
    return data[1];
  };
  EXPECT_THAT(reduce({60000, 1e6F, -1e6F}, ReduceOp::kSum, 1, 1),
              ElementsAre(kInfinity, kInfinity, -kInfinity));
  EXPECT_THAT(reduce({60000}, ReduceOp::kAverage, 1, 1), ElementsAre(60000))
      << "the sum is never of 16 bits";
  EXPECT_THAT(reduce({60000}, ReduceOp::kSum, 1, 0.5), ElementsAre(60000));
  EXPECT_THAT(reduce({131072}, ReduceOp::kAverage, 0.25, 4), ElementsAre(131072))
      << "neither factor overflows while it is applied";
  EXPECT_TRUE(std::isnan(reduce({std::nanf("")}, ReduceOp::kSum, 1, 1)[0]));
  EXPECT_THAT(reduce({0x1p-24F, 0x1p-26F}, ReduceOp::kMax, 1, 1), ElementsAre(0x1p-24F, 0))
      << "subnormals of the 16-bit type";
}

TEST(Compressed, AJoinedRankDoesNotChangeTheResult) {
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum,
                            ReduceOp::kAverage, ReduceOp::kAdasum}) {
    Job job(2);
    job.join(0);
    std::vector<float> data = {8, -2}, other = {4};
    std::vector<Submission> submissions;
    for (auto* memory : {&data, &other}) {
      Submission submission =
          compressed(*memory, memory == &data ? "x" : "y", Compression::kFloat16);
      allreduce_of(submission).op = op;
      allreduce_of(submission).prescale = -0.25;
      allreduce_of(submission).postscale = 3;
      submissions.push_back(submission);
    }
    job.submit(1, submissions);
    job.expect_all_ok();
    EXPECT_THAT(data, ElementsAre(-6, 1.5)) << to_string(op);
    EXPECT_THAT(other, ElementsAre(-3)) << to_string(op);
  }
}

TEST(Compressed, AdasumIsThatOfTheRoundedVectors) {
  Job job(2);
  std::vector<std::vector<float>> data = {{3, 0, 1.0001F}, {0, 4, 0}},
                                  equal = {{3, 5.0001F}, {3, 5.0001F}};
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Submission> submissions;
    for (auto* each : {&data, &equal}) {
      submissions.push_back(compressed((*each)[static_cast<std::size_t>(rank)],
                                       each == &data ? "a" : "b", Compression::kBFloat16));
      allreduce_of(submissions.back()).op = ReduceOp::kAdasum;
    }
    job.submit(rank, submissions);
  }
  job.expect_all_ok();
  EXPECT_THAT(data[1], ElementsAre(3, 4, 1));
  EXPECT_THAT(equal[0], ElementsAre(3, 5));
}

TEST(Compressed, RanksThatDisagreeGetAnError) {
  Job job(2);
  std::vector<float> one(3, 1), two(3, 1);
  job.submit(0, {compressed(one, "w", Compression::kFloat16)});
  job.submit(1, {compressed(two, "w", Compression::kNone)});
  for (const Operation& operation : job.run()) {
    EXPECT_EQ(operation.status().code, StatusCode::kMismatch);
    EXPECT_THAT(operation.status().message,
                HasSubstr("compression differs: rank 0 float16, rank 1 none"));
  }
}

TEST(Compressed, OnlyOneCompressionSharesABatchAndANameMayChangeIt) {
  Job job(2);
  std::vector<std::vector<float>> data(2);
  std::vector<std::vector<std::vector<float>>> tensors(2, std::vector<std::vector<float>>(6));
  for (const Compression second : {Compression::kNone, Compression::kBFloat16}) {
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<Submission> submissions;
      for (std::size_t tensor = 0; tensor < 6; ++tensor) {
        auto& memory = tensors[static_cast<std::size_t>(rank)][tensor] = {1.001F};
        submissions.push_back(compressed(memory, "t" + std::to_string(tensor),
                                         tensor % 2 == 0 ? Compression::kFloat16 : second));
      }
      job.submit(rank, submissions);
    }
    const std::uint64_t before = job.rank(0).metrics().backend_calls;
    job.expect_all_ok();
    EXPECT_EQ(job.rank(0).metrics().backend_calls - before, 2U);
    EXPECT_EQ(tensors[1][0], (std::vector<float>{0x1.004p1F}));
    EXPECT_EQ(tensors[1][1],
              (std::vector<float>{second == Compression::kNone ? 1.001F + 1.001F : 2.0F}));
  }
}

}  // namespace
}  // namespace hvd::testing
