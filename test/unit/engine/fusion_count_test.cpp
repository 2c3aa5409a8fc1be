// Counts the backend calls for a number of operations.
#include <gtest/gtest.h>

#include <numeric>

#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;

struct Gathered {
  std::vector<float> input;
  std::vector<float> output;
};

class FusionCountTest : public ::testing::Test {
 protected:
  FusionCountTest() : job_(make_options(), clock_) {}
  static LocalJobOptions make_options() {
    LocalJobOptions options;
    options.size = 3;
    options.runtime.background_thread = false;
    return options;
  }
  bool run(const std::vector<Operation>& operations) {
    return job_.run_until(clock_, seconds(10), [&] {
      return std::all_of(operations.begin(), operations.end(),
                         [](const Operation& o) { return o.done(); });
    });
  }
  static Submission gather(Gathered& gathered, const std::string& name) {
    Submission submission = float_operation(gathered.input, name, OpKind::kAllgather);
    submission.allocate_output = [&gathered](const OutputSizes& sizes) {
      const auto rows =
          std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
      gathered.output.resize(static_cast<std::size_t>(rows));
      return TensorView{reinterpret_cast<std::byte*>(gathered.output.data()),
                        rows,
                        DataType::kFloat32,
                        {},
                        {rows}};
    };
    return submission;
  }

  VirtualClock clock_;
  LocalJob job_;
};

TEST_F(FusionCountTest, AllreducesThatAreReadyTogetherMakeOneCall) {
  std::vector<std::vector<float>> data;
  for (int i = 0; i < 30; ++i) data.emplace_back(10 + i % 10, static_cast<float>(i % 10 + 1));
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<Submission> all;
    for (int i = 0; i < 10; ++i)
      all.push_back(
          float_operation(data[static_cast<std::size_t>(rank * 10 + i)], "t" + std::to_string(i)));
    for (auto& handle : job_.rank(rank).submit(std::move(all), Progress::kBackground))
      operations.push_back(handle);
  }
  ASSERT_TRUE(run(operations));
  for (int i = 0; i < 30; ++i)
    EXPECT_EQ(data[static_cast<std::size_t>(i)][0], 3.0F * static_cast<float>(i % 10 + 1));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job_.rank(rank).metrics().backend_calls, 1U);
}

TEST_F(FusionCountTest, RaggedAllgathersThatAreReadyTogetherMakeOneCall) {
  constexpr int kTensors = 5;
  std::vector<Gathered> data(3 * kTensors);
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<Submission> all;
    for (int i = 0; i < kTensors; ++i) {
      Gathered& gathered = data[static_cast<std::size_t>(rank * kTensors + i)];
      gathered.input.assign(static_cast<std::size_t>((rank + i) % 3),
                            static_cast<float>(10 * rank + i));
      all.push_back(gather(gathered, "g" + std::to_string(i)));
    }
    for (auto& handle : job_.rank(rank).submit(std::move(all), Progress::kBackground))
      operations.push_back(handle);
  }
  ASSERT_TRUE(run(operations));
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < kTensors; ++i) {
      std::vector<float> expected;
      for (int from = 0; from < 3; ++from) {
        expected.insert(expected.end(), static_cast<std::size_t>((from + i) % 3),
                        static_cast<float>(10 * from + i));
      }
      EXPECT_EQ(data[static_cast<std::size_t>(rank * kTensors + i)].output, expected)
          << "rank " << rank << " tensor " << i;
    }
    EXPECT_EQ(job_.rank(rank).metrics().backend_calls, 1U);
  }
}

TEST_F(FusionCountTest, ReducescattersThatAreReadyTogetherMakeOneCall) {
  constexpr int kTensors = 5;
  std::vector<Gathered> data(3 * kTensors);
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<Submission> all;
    for (int i = 0; i < kTensors; ++i) {
      Gathered& scattered = data[static_cast<std::size_t>(rank * kTensors + i)];
      for (int row = 0; row < 4 + i; ++row)
        scattered.input.push_back(static_cast<float>(100 * rank + 10 * i + row));
      scattered.output.resize(static_cast<std::size_t>(rows_of_member(4 + i, 3, rank)));
      Submission submission =
          float_operation(scattered.input, "r" + std::to_string(i), OpKind::kReducescatter);
      submission.output.data = reinterpret_cast<std::byte*>(scattered.output.data());
      submission.output.count = static_cast<std::int64_t>(scattered.output.size());
      all.push_back(std::move(submission));
    }
    for (auto& handle : job_.rank(rank).submit(std::move(all), Progress::kBackground))
      operations.push_back(handle);
  }
  ASSERT_TRUE(run(operations));
  for (int i = 0; i < kTensors; ++i) {
    float row = 0;  // the ranks' rows, one after the other
    for (int rank = 0; rank < 3; ++rank) {
      for (const float value : data[static_cast<std::size_t>(rank * kTensors + i)].output) {
        EXPECT_EQ(value, 300 + 3 * (static_cast<float>(10 * i) + row))
            << "rank " << rank << " tensor " << i;
        ++row;
      }
    }
    EXPECT_EQ(row, static_cast<float>(4 + i));
  }
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job_.rank(rank).metrics().backend_calls, 1U);
}

TEST_F(FusionCountTest, ARepeatedStepTravelsAsBits) {
  std::vector<std::vector<float>> data(30, std::vector<float>(10, 1.0F));
  for (int step = 0; step < 3; ++step) {
    std::vector<Operation> operations;
    for (int rank = 0; rank < 3; ++rank) {
      for (int i = 0; i < 10; ++i) {
        // Every other tensor is unnamed.
        const std::string name = i % 2 == 0 ? "t" + std::to_string(i) : "";
        operations.push_back(submit_one(
            job_.rank(rank), float_operation(data[static_cast<std::size_t>(rank * 10 + i)], name)));
      }
    }
    ASSERT_TRUE(run(operations));
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job_.rank(rank).metrics().negotiated_operations, 30U);
    EXPECT_EQ(job_.rank(rank).metrics().cached_operations, 20U);
  }
}

}  // namespace
}  // namespace hvd::testing
