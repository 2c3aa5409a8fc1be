// Counts the backend calls for a number of operations.
#include <gtest/gtest.h>

#include <numeric>

#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;

struct Tensors {
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
  static Submission gather(Tensors& gathered, const std::string& name) {
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

  /// Every rank submits this number of operations in one call, and one collective runs them.
  /// @param make (tensors of this operation, rank, number) -> Submission
  template <class Make>
  std::vector<Tensors> run_in_one_call(int operations, const Make& make) {
    std::vector<Tensors> data(static_cast<std::size_t>(3 * operations));
    std::vector<Operation> handles;
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<Submission> all;
      for (int i = 0; i < operations; ++i)
        all.push_back(make(data[static_cast<std::size_t>(rank * operations + i)], rank, i));
      for (auto& handle : job_.rank(rank).submit(all, Progress::kBackground))
        handles.push_back(handle);
    }
    EXPECT_TRUE(run(handles));
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job_.rank(rank).metrics().backend_calls, 1U);
    return data;
  }

  VirtualClock clock_;
  LocalJob job_;
};

TEST_F(FusionCountTest, AllreducesThatAreReadyTogetherMakeOneCall) {
  const auto data = run_in_one_call(10, [](Tensors& tensors, int, int i) {
    tensors.input.assign(static_cast<std::size_t>(10 + i), static_cast<float>(i + 1));
    return float_operation(tensors.input, "t" + std::to_string(i));
  });
  for (std::size_t i = 0; i < data.size(); ++i)
    EXPECT_EQ(data[i].input[0], 3.0F * static_cast<float>(i % 10 + 1));
}

TEST_F(FusionCountTest, RaggedAllgathersThatAreReadyTogetherMakeOneCall) {
  constexpr int kTensors = 5;
  const auto rows = [](int rank, int i) { return static_cast<std::size_t>((rank + i) % 3); };
  const auto value = [](int rank, int i) { return static_cast<float>(10 * rank + i); };
  const auto data = run_in_one_call(kTensors, [&](Tensors& tensors, int rank, int i) {
    tensors.input.assign(rows(rank, i), value(rank, i));
    return gather(tensors, "g" + std::to_string(i));
  });
  for (int i = 0; i < kTensors; ++i) {
    std::vector<float> expected;
    for (int from = 0; from < 3; ++from)
      expected.insert(expected.end(), rows(from, i), value(from, i));
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(data[static_cast<std::size_t>(rank * kTensors + i)].output, expected)
          << "rank " << rank << " tensor " << i;
  }
}

TEST_F(FusionCountTest, ReducescattersThatAreReadyTogetherMakeOneCall) {
  constexpr int kTensors = 5;
  const auto data = run_in_one_call(kTensors, [](Tensors& scattered, int rank, int i) {
    for (int row = 0; row < 4 + i; ++row)
      scattered.input.push_back(static_cast<float>(100 * rank + 10 * i + row));
    scattered.output.resize(static_cast<std::size_t>(rows_of_member(4 + i, 3, rank)));
    Submission submission =
        float_operation(scattered.input, "r" + std::to_string(i), OpKind::kReducescatter);
    submission.output.data = reinterpret_cast<std::byte*>(scattered.output.data());
    submission.output.count = static_cast<std::int64_t>(scattered.output.size());
    return submission;
  });
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
