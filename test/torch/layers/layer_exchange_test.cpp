#include "layers/layer_exchange.h"

#include "torch/support/torch_test.h"

// Tests the exchanges of layers, which reuse the memory of the previous exchange if they can.

namespace hvd::testing {
namespace {

using libtorch::LayerExchange;

torch::Tensor row_of(int rank, std::int64_t columns, torch::ScalarType type, int step) {
  return rank_tensor(rank, {1, columns}, type, step);
}

TEST(LayerExchange, GathersRowsAndSums) {
  LayerExchange exchange("exchange.values", {});
  for (int step = 0; step < 20; ++step) {
    // Changes the dtype now and then, as a layer does for inputs of another dtype.
    const auto type = step % 7 < 4 ? torch::kFloat32 : torch::kFloat64;
    const std::int64_t columns = step % 11 < 6 ? 5 : 9;
    const torch::Tensor own = row_of(rank(), columns, type, step);
    std::vector<torch::Tensor> all;
    for (int r = 0; r < size(); ++r) all.push_back(row_of(r, columns, type, step));
    EXPECT_TRUE(torch::equal(exchange.gathered(own), torch::cat(all))) << step;
    EXPECT_TRUE(near(exchange.summed(own), reference_reduce(all, ReduceOp::kSum))) << step;
    EXPECT_TRUE(torch::equal(own, row_of(rank(), columns, type, step))) << "the input has changed";
  }
}

TEST(LayerExchange, TakesRowsThatAreNotContiguous) {
  LayerExchange exchange("exchange.strided", {});
  const torch::Tensor wide = rank_tensor(rank(), {4, 6}, torch::kFloat32);
  std::vector<torch::Tensor> all;
  for (int r = 0; r < size(); ++r) all.push_back(rank_tensor(r, {4, 6}, torch::kFloat32).t());
  EXPECT_TRUE(near(exchange.summed(wide.t()), reference_reduce(all, ReduceOp::kSum)));
}

TEST(LayerExchange, AnErrorIsTheCallersAndTheNextExchangeIsWhole) {
  if (size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  LayerExchange exchange("exchange.errors", {});
  const auto check = [&](int step) {
    std::vector<torch::Tensor> all;
    for (int r = 0; r < size(); ++r) all.push_back(row_of(r, 4, torch::kFloat32, step));
    const torch::Tensor own = row_of(rank(), 4, torch::kFloat32, step);
    EXPECT_TRUE(torch::equal(exchange.gathered(own), torch::cat(all))) << step;
    EXPECT_TRUE(near(exchange.summed(own), reference_reduce(all, ReduceOp::kSum))) << step;
  };
  for (int step = 0; step < 3; ++step) check(step);
  const std::int64_t columns = rank() == size() - 1 ? 5 : 4;
  const torch::Tensor other = row_of(rank(), columns, torch::kFloat32, 0);
  EXPECT_THROW(exchange.gathered(other), MismatchError);
  EXPECT_THROW(exchange.summed(other), MismatchError);
  for (int step = 3; step < 6; ++step) check(step);
}

TEST(LayerExchange, ARankThatHasJoinedHasNoRow) {
  if (size() == 1) GTEST_SKIP() << "one rank joins alone";
  LayerExchange exchange("exchange.join", {});
  const torch::Tensor own = row_of(rank(), 3, torch::kFloat32, 1);
  EXPECT_EQ(exchange.gathered(own).size(0), size());
  if (rank() != 0) {
    std::vector<torch::Tensor> others;
    for (int r = 1; r < size(); ++r) others.push_back(row_of(r, 3, torch::kFloat32, 1));
    for (int step = 0; step < 3; ++step) {
      EXPECT_TRUE(torch::equal(exchange.gathered(own), torch::cat(others))) << step;
      EXPECT_TRUE(near(exchange.summed(own), reference_reduce(others, ReduceOp::kSum))) << step;
    }
  }
  join();
  EXPECT_EQ(exchange.gathered(own).size(0), size());
}

}  // namespace
}  // namespace hvd::testing
