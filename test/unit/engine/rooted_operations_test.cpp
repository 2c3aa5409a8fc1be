// Reduce and scatter: the results, and the errors of ranks that disagree. Random programs
// of the simulation run both among the other kinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/stepped_ranks.h"

namespace hvd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A rank's side of a scatter of rows of two numbers, and its result.
struct Scattered {
  Submission submission(std::vector<float>& rows, int root) {
    Submission submission = float_operation(rows, "s", OpKind::kScatter);
    submission.parameters = Scatter{root};
    submission.output = {};
    submission.input.shape = {static_cast<std::int64_t>(rows.size()) / 2, 2};
    submission.allocate_output = [this](const OutputSizes& sizes) {
      first_dims.assign(sizes.first_dims.begin(), sizes.first_dims.end());
      received.resize(2 * static_cast<std::size_t>(sizes.first_dims[0]));
      TensorView view = float_operation(received, "").output;
      view.shape = {sizes.first_dims[0], 2};
      return view;
    };
    return submission;
  }
  std::vector<float> received = {};
  std::vector<std::int64_t> first_dims = {};
};

TEST(RootedOperations, AScatterSharesOutTheRootsRowsAndReadsNoOthers) {
  Ranks ranks(3);
  std::vector<float> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};  // five rows
  std::vector<float> ignored(4, -1);
  for (int use = 0; use < 3; ++use) {  // the last use is from the response cache
    std::vector<Scattered> sides(3);
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<float>& rows = rank == 1 ? all : ignored;
      Submission submission = sides[static_cast<std::size_t>(rank)].submission(rows, 1);
      if (rank == 2) submission.input.data = nullptr;
      ranks.submit(rank, std::move(submission));
    }
    for (const Operation& operation : ranks.run())
      ASSERT_TRUE(operation.status().ok()) << operation.status().message;
    EXPECT_THAT(sides[0].received, ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(sides[1].received, ElementsAre(4, 5, 6, 7));
    EXPECT_THAT(sides[2].received, ElementsAre(8, 9));
    EXPECT_THAT(sides[2].first_dims, ElementsAre(1));
  }
}

TEST(RootedOperations, FewerRowsThanRanksLeaveTheLastWithNone) {
  Ranks ranks(3);
  std::vector<float> one_row = {1, 2};
  std::vector<float> none;
  for (const std::size_t rows : {1U, 0U}) {
    std::vector<Scattered> sides(3);
    for (int rank = 0; rank < 3; ++rank)
      ranks.submit(rank, sides[static_cast<std::size_t>(rank)].submission(
                             rank == 2 && rows > 0 ? one_row : none, 2));
    for (const Operation& operation : ranks.run())
      ASSERT_TRUE(operation.status().ok()) << operation.status().message;
    EXPECT_EQ(sides[0].received.size(), 2 * rows);
    EXPECT_THAT(sides[1].received, ElementsAre());
    EXPECT_THAT(sides[2].first_dims, ElementsAre(0));
  }
}

TEST(RootedOperations, AReduceGivesTheRootTheResultAndLeavesEveryInput) {
  Ranks ranks(3);
  std::vector<std::vector<float>> data = {{1, 2}, {3, 4}, {5, 6}};
  std::vector<std::vector<float>> outputs(3, std::vector<float>(2));
  const auto inputs = data;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    Submission submission = float_operation(data[rank], "r");
    submission.parameters = Reduce{.op = ReduceOp::kAverage, .postscale = 2, .root = 2};
    submission.output.data = reinterpret_cast<std::byte*>(outputs[rank].data());
    ranks.submit(static_cast<int>(rank), std::move(submission));
  }
  for (const Operation& operation : ranks.run())
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  EXPECT_THAT(outputs[2], ElementsAre(6, 8));
  EXPECT_EQ(data, inputs);
}

TEST(RootedOperations, RanksThatDisagreeAboutTheRootOrTheKindGetAnError) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data = {{1, 2}, {3, 4}};
  std::vector<Scattered> sides(2);
  const auto expect_mismatch = [&](const char* what) {
    for (const Operation& operation : ranks.run()) {
      EXPECT_EQ(operation.status().code, StatusCode::kMismatch);
      EXPECT_THAT(operation.status().message, HasSubstr(what));
    }
  };
  for (int rank = 0; rank < 2; ++rank) {
    Submission submission = float_operation(data[static_cast<std::size_t>(rank)], "r");
    submission.parameters = Reduce{.root = rank};
    ranks.submit(rank, std::move(submission));
  }
  expect_mismatch("reduce 'r': root differs: rank 0 uses rank 0, rank 1 uses rank 1");
  for (int rank = 0; rank < 2; ++rank)
    ranks.submit(rank, sides[static_cast<std::size_t>(rank)].submission(
                           data[static_cast<std::size_t>(rank)], 1 - rank));
  expect_mismatch("scatter 's': root differs: rank 0 uses rank 1, rank 1 uses rank 0");
  for (int rank = 0; rank < 2; ++rank) {
    Submission submission = float_operation(data[static_cast<std::size_t>(rank)], "k");
    if (rank == 1) submission.parameters = Reduce{};
    ranks.submit(rank, std::move(submission));
  }
  expect_mismatch("kind of operation differs: rank 0 allreduce, rank 1 reduce");
}

TEST(RootedOperations, ARootThatHasJoinedCannotBeOne) {
  Ranks ranks(2);
  const Operation joined = submit_one(ranks.rank(0), join_operation());
  std::vector<float> data = {1, 2};
  Scattered side;
  ranks.submit(1, side.submission(data, 0));
  EXPECT_THAT(ranks.run().front().status().message,
              HasSubstr("rank 0, its root, has called join()"));
  Submission reduce = float_operation(data, "r");
  reduce.parameters = Reduce{.root = 0};
  ranks.submit(1, std::move(reduce));
  EXPECT_THAT(ranks.run().front().status().message,
              HasSubstr("rank 0, its root, has called join()"));
}

}  // namespace
}  // namespace hvd::testing
