#include <thread>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

/// A rank's [6, 4, 2] tensor with two sparse dimensions and repeated indices. The last of several
/// ranks has no entries.
torch::Tensor coo_of(int r, torch::ScalarType type) {
  const std::int64_t entries = r > 0 && r == size() - 1 ? 0 : 2 * r + 3;
  const torch::Tensor n = torch::arange(entries, torch::kInt64);
  const torch::Tensor indices = torch::stack({(n * (r + 2)) % 6, torch::floor_divide(n, 2) % 4});
  return torch::sparse_coo_tensor(indices, rank_tensor(r, {entries, 2}, type), {6, 4, 2});
}

/// The reduction of the members' dense tensors.
torch::Tensor dense_reference(const ProcessSet& set, torch::ScalarType type, ReduceOp op) {
  std::vector<torch::Tensor> dense;
  for (const int r : set.ranks()) dense.push_back(coo_of(r, type).to_dense());
  return reference_reduce(dense, op);
}

void expect_coalesced(const torch::Tensor& result, const torch::Tensor& expected,
                      double tolerance) {
  EXPECT_TRUE(result.is_sparse());
  EXPECT_TRUE(result.is_coalesced());
  EXPECT_EQ(result.sparse_dim(), 2);
  EXPECT_TRUE(near(result.to_dense(), expected, tolerance));
}

TEST(SparseAllreduce, EveryTypeMatchesTheDenseReference) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type :
         {torch::kUInt8, torch::kInt16, torch::kInt64, torch::kFloat16, torch::kBFloat16,
          torch::kFloat32, torch::kFloat64}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::string(to_string(op)));
        const torch::Tensor own = coo_of(rank(), type);
        const torch::Tensor expected = dense_reference(set, type, op);
        const AllreduceOptions options{.name = "sparse", .op = op, .process_set = set};
        expect_coalesced(sparse_allreduce(own, options), expected, 1e-2);
        expect_coalesced(sparse_allreduce_async(own.coalesce(), options).wait(), expected, 1e-2);
      }
    }
  });
}

TEST(SparseAllreduce, HalvesAreAddedInFloat32) {
  // In float16, 2048 + 1 is 2048.
  const torch::Tensor own =
      torch::sparse_coo_tensor(torch::zeros({1, 3}, torch::kInt64),
                               torch::tensor({2048.0, 1.0, 1.0}).to(torch::kFloat16), {2});
  const torch::Tensor result = sparse_allreduce(own, {.name = "halves"}).to_dense();
  EXPECT_EQ(result[0].item<float>(), 2050.0F);
}

TEST(SparseAllreduce, SmallIntegersDoNotWrapBeforeTheyAreAveraged) {
  const torch::Tensor own = torch::sparse_coo_tensor(torch::zeros({1, 1}, torch::kInt64),
                                                     torch::tensor({200}).to(torch::kUInt8), {2});
  const torch::Tensor result = sparse_allreduce(own, {.name = "bytes"}).to_dense();
  EXPECT_EQ(result[0].item<int>(), 200);
}

TEST(SparseAllreduce, FactorsAndCompression) {
  const torch::Tensor own = coo_of(rank(), torch::kFloat64);
  const torch::Tensor sum = dense_reference({}, torch::kFloat64, ReduceOp::kSum);
  AllreduceOptions options{
      .name = "scaled", .op = ReduceOp::kSum, .prescale_factor = 0.5, .postscale_factor = 3};
  expect_coalesced(sparse_allreduce(own, options), sum * 1.5, 1e-6);
  options.compression = Compression::kFloat16;
  expect_coalesced(sparse_allreduce(own / 3, options), sum * 0.5, 1e-2);
  options.op = ReduceOp::kAverage;
  expect_coalesced(sparse_allreduce(own / 3, options), sum * 0.5 / size(), 1e-2);
}

TEST(SparseAllreduce, NoRankHasEntries) {
  const torch::Tensor result = sparse_allreduce(coo_of(rank(), torch::kFloat32) * 0, {.name = "z"});
  EXPECT_TRUE(torch::equal(result.to_dense(), torch::zeros({6, 4, 2})));
  const torch::Tensor empty = torch::zeros({3, 2}).to_sparse();
  EXPECT_EQ(sparse_allreduce(empty, {.name = "empty"})._nnz(), 0);
  EXPECT_EQ(sparse_allreduce(empty)._nnz(), 0);  // unnamed
}

TEST(SparseAllreduce, WrongCallsAreUsageErrors) {
  const auto message = [](const torch::Tensor& tensor, const AllreduceOptions& options = {}) {
    return message_of<UsageError>([&] { sparse_allreduce(tensor, options); });
  };
  EXPECT_NE(message(torch::ones({2}), {.name = "d"}).find("'d'"), std::string::npos);
  const torch::Tensor coo = torch::ones({2}).to_sparse();
  EXPECT_NE(message(coo, {.op = ReduceOp::kMax}).find("got max"), std::string::npos);
  EXPECT_NE(message(coo.to(torch::kBool)).find("bool"), std::string::npos);
  EXPECT_NE(message(coo.detach().requires_grad_()).find("requires grad"), std::string::npos);
  EXPECT_THROW(sparse_allreduce(torch::Tensor()), UsageError);
  EXPECT_THROW(sparse_allreduce_async(torch::ones({2})), UsageError);
  EXPECT_NE(message_of<UsageError>([&] {
              sparse_allreduce_async(coo.detach().requires_grad_());
            }).find("requires grad"),
            std::string::npos);
}

TEST(SparseAllreduce, ADisagreementReachesEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto reduce = [](const torch::Tensor& tensor) {
    return message_of<MismatchError>([&] { sparse_allreduce(tensor, {.name = "shapes"}); });
  };
  const bool odd = rank() == 1;
  // The ranks differ in sizes, numbers of sparse dimensions, dense dimensions, and dtype.
  const std::string text = reduce(torch::ones({odd ? 3 : 2, 2}).to_sparse(1));
  EXPECT_NE(text.find("[3,2]"), std::string::npos) << text;
  EXPECT_NE(text.find("'shapes'"), std::string::npos) << text;
  reduce(torch::ones({2, 2}).to_sparse(odd ? 2 : 1));
  reduce(torch::ones({2, odd ? 3 : 2}).to_sparse(1));
  reduce(torch::ones({2}, odd ? torch::kFloat32 : torch::kFloat64).to_sparse());
  EXPECT_TRUE(near(sparse_allreduce(torch::ones({2}).to_sparse(), {.name = "shapes"}).to_dense(),
                   torch::ones({2})));
}

TEST(SparseAllreduce, ARankThatHasJoinedDoesNotCount) {
  const torch::Tensor own =
      torch::sparse_coo_tensor(torch::zeros({1, 1}, torch::kInt64), torch::tensor({4.0}), {2});
  if (rank() != 0 || size() == 1) {
    const torch::Tensor result = sparse_allreduce(own, {.name = "joined"}).to_dense();
    EXPECT_EQ(result[0].item<float>(), 4.0F);
  }
  join();
}

// Sparse gradients in DistributedOptimizer.

constexpr int kRows = 10;

/// An embedding and a dense layer.
struct TableImpl : torch::nn::Module {
  torch::nn::Embedding table{nullptr}, rare{nullptr};
  torch::nn::Linear head{nullptr};

  explicit TableImpl(bool sparse)
      : table(register_module("table", torch::nn::Embedding(options(sparse)))),
        rare(register_module("rare", torch::nn::Embedding(options(sparse)))),
        head(register_module("head", torch::nn::Linear(3, 1))) {}

  static torch::nn::EmbeddingOptions options(bool sparse) {
    return torch::nn::EmbeddingOptions(kRows, 3).sparse(sparse);
  }

  /// The loss of the rows that a rank uses in a step. Few ranks use the rare table, and no rank
  /// does in the first step.
  torch::Tensor loss(int r, int step) {
    torch::Tensor x =
        table->forward(torch::tensor({(r + step) % kRows, (3 * r + 1) % kRows, kRows - 1}));
    if (step >= 2 && (r + step) % 2 == 0) x = x + rare->forward(torch::tensor({r, 0, r}));
    return torch::tanh(head->forward(x)).square().sum();
  }
};
TORCH_MODULE(Table);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Table&)>;

/// Compares sparse training on the members of a set with dense training in one process. In the
/// first step the set's first member has no gradient.
void check_sparse_training(const ProcessSet& set, const MakeOptimizer& make,
                           DistributedOptimizerOptions options = {}, double tolerance = 1e-5) {
  torch::manual_seed(3);
  Table net(true), serial(false);
  copy_values(*net, *serial);
  const auto inner = make(net), reference = make(serial);
  options.process_set = set;
  const double divisor = options.op == ReduceOp::kSum ? 1 : set.size();
  const int passes = options.backward_passes_per_step;
  DistributedOptimizer optimizer(*inner, net->named_parameters(), std::move(options));
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    reference->zero_grad();
    for (int pass = 0; pass < passes; ++pass) {
      for (const int r : set.ranks()) {
        if (step == 0 && r == set.ranks().front() && set.size() > 1) continue;
        if (r == rank()) net->loss(r, step + pass).backward();
        (serial->loss(r, step + pass) / divisor).backward();
      }
    }
    optimizer.step();
    reference->step();
    if (set.size() > 1) {
      EXPECT_TRUE(net->table->weight.grad().is_sparse());
    }
    EXPECT_EQ(net->rare->weight.grad().defined(), serial->rare->weight.grad().defined());
  }
  const auto expected = serial->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(near(item.value(), expected[item.key()], tolerance)) << item.key();
  }
}

std::unique_ptr<torch::optim::Optimizer> sgd(Table& net) {
  return std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
}
std::unique_ptr<torch::optim::Optimizer> adagrad(Table& net) {
  return std::make_unique<torch::optim::Adagrad>(net->parameters(), 0.1);
}

TEST(SparseTraining, EqualsDenseTrainingInOneProcess) {
  for_each_set([](const ProcessSet& set) {
    check_sparse_training(set, sgd);
    check_sparse_training(set, adagrad);
    check_sparse_training(set, sgd, {.op = ReduceOp::kSum});
  });
}

TEST(SparseTraining, WithEveryOption) {
  check_sparse_training({}, sgd, {.compression = Compression::kBFloat16}, 5e-2);
  check_sparse_training({}, sgd, {.backward_passes_per_step = 2});
  check_sparse_training({}, sgd, {.gradient_predivide_factor = 3});
  check_sparse_training({}, sgd, {.groups = {{"table.weight", "head.bias"}, {"rare.weight"}}});
}

TEST(SparseTraining, ADenseGradientWhereTheOthersAreSparse) {
  torch::manual_seed(3);
  torch::nn::Embedding net(TableImpl::options(true)), serial(TableImpl::options(false));
  copy_values(*net, *serial);
  torch::optim::SGD inner(net->parameters(), 0.1), reference(serial->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  const auto loss = [](torch::nn::Embedding& table, int r, int step) {
    torch::Tensor sum = table->forward(torch::tensor({(r + step) % kRows, 1})).square().sum();
    // From the second step on one rank in turn has a dense gradient.
    if (step > 0 && r == step % size()) sum = sum + table->weight.sum();
    return sum;
  };
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    loss(net, rank(), step).backward();
    for (int r = 0; r < size(); ++r) (loss(serial, r, step) / size()).backward();
    optimizer.step();
    reference.step();
  }
  EXPECT_TRUE(near(net->weight, serial->weight, 1e-5));
}

TEST(SparseTraining, AFirstDenseGradientOnOneRankMakesAllDense) {
  torch::manual_seed(3);
  torch::nn::Embedding net(TableImpl::options(rank() == 0)), serial(TableImpl::options(false));
  copy_values(*net, *serial);
  torch::optim::SGD inner(net->parameters(), 0.1), reference(serial->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    net->forward(torch::tensor({rank() + step, 1})).sum().backward();
    for (int r = 0; r < size(); ++r) {
      (serial->forward(torch::tensor({r + step, 1})).sum() / size()).backward();
    }
    optimizer.step();
    reference.step();
    EXPECT_EQ(net->weight.grad().is_sparse(), size() == 1);
  }
  EXPECT_TRUE(near(net->weight, serial->weight, 1e-5));
}

TEST(SparseTraining, AFirstGradientAfterTheFirstStep) {
  // No gradient is sparse in the first step, so the ranks do not compare again.
  torch::manual_seed(3);
  Table net(true), serial(false);
  copy_values(*net, *serial);
  torch::optim::SGD inner(net->parameters(), 0.1), reference(serial->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  optimizer.step();
  for (int step = 2; step < 5; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    for (int r = 0; r < size(); ++r) {
      if (r == 0 && size() > 1) continue;  // rank 0 still has no gradient
      if (r == rank()) net->loss(r, step).backward();
      (serial->loss(r, step) / size()).backward();
    }
    optimizer.step();
    reference.step();
  }
  EXPECT_TRUE(near(net->table->weight, serial->table->weight, 1e-5));
  EXPECT_TRUE(near(net->rare->weight, serial->rare->weight, 1e-5));
}

TEST(SparseTraining, AdasumNeedsDenseGradients) {
  torch::nn::Embedding net(TableImpl::options(true));
  torch::optim::SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.op = ReduceOp::kAdasum});
  net->forward(torch::tensor({1})).sum().backward();
  EXPECT_NE(message_of<UsageError>([&] { optimizer.step(); }).find("sparse_as_dense"),
            std::string::npos);
}

TEST(SparseTraining, DiscardingReductionsInFlight) {
  torch::manual_seed(3);
  Table net(true);
  torch::optim::SGD inner(net->parameters(), 0.1);
  for (const bool by_module : {false, true}) {
    DistributedOptimizer optimizer(inner, net->named_parameters());
    net->loss(rank(), 2).backward();
    by_module ? net->zero_grad() : optimizer.zero_grad();
    net->loss(rank(), 3).backward();
    optimizer.synchronize();
    Table serial(false);
    copy_values(*net, *serial);
    for (int r = 0; r < size(); ++r) (serial->loss(r, 3) / size()).backward();
    EXPECT_TRUE(near(net->table->weight.grad().to_dense(), serial->table->weight.grad(), 1e-5));
    optimizer.zero_grad();
  }
}

TEST(SparseTraining, AllReduceOfParametersRefusesSparseGradients) {
  torch::nn::Embedding net(TableImpl::options(true));
  net->forward(torch::tensor({1})).sum().backward();
  EXPECT_THROW(all_reduce(net->parameters()), UsageError);
}

}  // namespace
}  // namespace hvd::testing
