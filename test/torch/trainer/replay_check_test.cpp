#include "trainer/replay_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hvd/torch.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hvd/torch/batch_codec.h"
#include "hvd/torch/corruption_error.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using libtorch::judge_replays;
using libtorch::ReplayCheck;
using libtorch::ReplayedBatch;
using libtorch::ReplayRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace nn = torch::nn;

// --- Batches as bytes ---

struct Nested {
  std::vector<torch::Tensor> tensors;
  std::map<std::string, std::vector<std::int64_t>> lengths;
  std::optional<torch::Tensor> mask;
};
struct Sample {
  torch::data::Example<> example;
  std::pair<Nested, std::tuple<int, std::string>> rest;
};
struct Unsendable {
  explicit Unsendable(int /*number*/) {}
  virtual ~Unsendable() = default;
};

static_assert(libtorch::is_sendable<torch::Tensor>());
static_assert(libtorch::is_sendable<Sample>());
static_assert(libtorch::is_sendable<std::vector<torch::data::TensorExample>>());
static_assert(!libtorch::is_sendable<Unsendable>());
static_assert(!libtorch::is_sendable<std::vector<Unsendable>>());

TEST(BatchCodec, CopiesAllParts) {
  Sample sample{.example = {torch::randn({2, 3}), torch::tensor({1, 2})},
                .rest = {{.tensors = {torch::ones({0, 2}), torch::Tensor(), torch::tensor(true)},
                          .lengths = {{"a", {1, 2}}},
                          .mask = std::nullopt},
                         {7, "text"}}};
  const auto copy = libtorch::decode_batch<Sample>(libtorch::encode_batch(sample));
  EXPECT_TRUE(torch::equal(copy.example.data, sample.example.data));
  EXPECT_TRUE(torch::equal(copy.example.target, sample.example.target));
  const Nested& nested = copy.rest.first;
  ASSERT_EQ(nested.tensors.size(), 3u);
  EXPECT_EQ(nested.tensors[0].sizes(), at::IntArrayRef({0, 2}));
  EXPECT_FALSE(nested.tensors[1].defined());
  EXPECT_TRUE(nested.tensors[2].item<bool>());
  EXPECT_EQ(nested.lengths, sample.rest.first.lengths);
  EXPECT_FALSE(nested.mask);
  EXPECT_EQ(copy.rest.second, sample.rest.second);
  const auto examples = libtorch::decode_batch<std::vector<torch::data::TensorExample>>(
      libtorch::encode_batch(std::vector<torch::data::TensorExample>{torch::ones({2})}));
  EXPECT_TRUE(torch::equal(examples.at(0).data, torch::ones({2})));
}

TEST(BatchCodec, KeepsStridesAndAlignment) {
  const torch::Tensor whole = torch::arange(4096).to(torch::kFloat32);
  for (const torch::Tensor& tensor :
       {whole.view({2, 8, 16, 16}).contiguous(torch::MemoryFormat::ChannelsLast),
        whole.narrow(0, 3, 100), whole.view({64, 64}).t(), whole.view({64, 64}).select(1, 5),
        whole.narrow(0, 0, 1).expand({3, 5}), torch::tensor(2.5)}) {
    const auto copy = libtorch::decode_batch<torch::Tensor>(libtorch::encode_batch(tensor));
    EXPECT_TRUE(torch::equal(copy, tensor));
    EXPECT_EQ(copy.strides(), tensor.strides());
    const auto alignment = [](const torch::Tensor& of) {
      return reinterpret_cast<std::uintptr_t>(of.const_data_ptr()) % 64;
    };
    EXPECT_EQ(alignment(copy), alignment(tensor));
  }
}

// --- Verdicts ---

class Verdict : public ::testing::Test {
 protected:
  /// Ranks without differences.
  static std::vector<ReplayRecord> equal(int ranks) {
    std::vector<ReplayRecord> records;
    for (int i = 0; i < ranks; ++i) {
      records.push_back({.not_repeated = -1,
                         .gradients = {i, 10 + i},
                         .previous = {(i + ranks - 1) % ranks, 10 + (i + ranks - 1) % ranks},
                         .parameters = {7, 8, 9}});
    }
    if (ranks == 1) records[0].previous = {};
    return records;
  }
  static libtorch::ReplayVerdict judge(const std::vector<ReplayRecord>& records) {
    return judge_replays(records, {"a", "b"}, {"a", "b", "frozen"});
  }
};

TEST_F(Verdict, IsEmptyIfAllIsEqual) {
  for (const int ranks : {1, 2, 3, 5}) EXPECT_TRUE(judge(equal(ranks)).ranks.empty());
}

TEST_F(Verdict, NamesTheRankThatDoesNotRepeatItself) {
  for (const int ranks : {1, 2, 3}) {
    auto records = equal(ranks);
    records[0].not_repeated = 1;
    records[0].gradients[1] = 99;  // so rank 1 differs, too
    EXPECT_THAT(judge(records).ranks, ElementsAre(0));
    EXPECT_EQ(judge(records).reason,
              "rank 0 has computed the gradient of 'b' twice from one batch, with different "
              "results");
  }
}

TEST_F(Verdict, NamesTheMinorityOfParameters) {
  auto records = equal(3);
  records[1].parameters[2] = 0;
  records[1].previous = {5, 5};
  records[2].previous = {5, 5};
  EXPECT_THAT(judge(records).ranks, ElementsAre(1));
  EXPECT_EQ(judge(records).reason,
            "the parameters of rank 1 differ from those of ranks 0 and 2, for example 'frozen'");
}

TEST_F(Verdict, NamesAllRanksWithoutAMajority) {
  auto records = equal(2);
  records[1].parameters[0] = 0;
  EXPECT_THAT(judge(records).ranks, ElementsAre(0, 1));
  EXPECT_THAT(judge(records).reason, HasSubstr("ranks 0 and 1 differ, for example 'a', and no more "
                                               "than half of the ranks agree"));
  records = equal(4);
  records[1].parameters[0] = records[3].parameters[0] = 0;
  EXPECT_THAT(judge(records).ranks, ElementsAre(0, 1, 2, 3));
}

TEST_F(Verdict, TrustsTheRankThatHasComputedTwice) {
  for (const int ranks : {2, 3, 4}) {
    auto records = equal(ranks);
    records[1].previous[1] = 99;
    EXPECT_THAT(judge(records).ranks, ElementsAre(1));
    EXPECT_EQ(
        judge(records).reason,
        "rank 1 has computed another gradient of 'b' from the batch of rank 0 than that rank, "
        "which has computed it twice");
  }
}

TEST_F(Verdict, NamesTheRankBetweenTwoDifferences) {
  auto records = equal(4);
  records[1].previous[0] = records[2].previous[0] = 99;
  EXPECT_THAT(judge(records).ranks, ElementsAre(1));
  EXPECT_EQ(judge(records).reason,
            "rank 1 has computed other gradients of 'a' than the ranks before and after, from the "
            "same batches");
  records = equal(2);
  records[0].previous[0] = records[1].previous[0] = 99;
  EXPECT_THAT(judge(records).ranks, ElementsAre(0, 1));
  EXPECT_THAT(judge(records).reason, HasSubstr("each of them may be at fault"));
}

// --- Training ---

/// Has dropout, running statistics, and noise of the program's own stream.
struct NoisyNetImpl : nn::Module {
  explicit NoisyNetImpl(RandomStreams streams) : streams_(std::move(streams)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor noise = torch::randn({6}, streams_.own("noise"), torch::TensorOptions());
    return second(dropout(torch::relu(norm(first(x + 0.1 * noise)))));
  }

  RandomStreams streams_;
  nn::Linear first = register_module("first", nn::Linear(6, 8));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(8));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.3));
  nn::Linear second = register_module("second", nn::Linear(8, 3));
};
TORCH_MODULE(NoisyNet);

void flip_bit(const torch::Tensor& tensor, std::int64_t index = 0) {
  const torch::NoGradGuard no_grad;
  auto* const value = static_cast<float*>(tensor.mutable_data_ptr()) + index;
  std::uint32_t bits = 0;
  std::memcpy(&bits, value, sizeof(bits));
  bits ^= 1U << 12;
  std::memcpy(value, &bits, sizeof(bits));
}

/// Some steps of training on this rank's random batches.
class Training {
 public:
  explicit Training(std::int64_t every, int accumulation = 1, bool sharded = false)
      : accumulation_(accumulation), check_(net_.ptr(), every, {streams_}) {
    streams_.seed_default();
    broadcast_parameters(net_);
    if (sharded) {
      sharded_.emplace(adam_, net_->named_parameters());
    } else {
      optimizer_.emplace(adam_, net_, DistributedOptimizerOptions{.check_every = 0});
    }
  }

  void step() {
    sharded_ ? sharded_->zero_grad() : optimizer_->zero_grad();
    ++step_;
    for (int i = 1; i <= accumulation_; ++i) {
      std::optional<NoSync> no_sync;
      const bool checked = check_.is_due(step_) && i == accumulation_;
      if (checked || i < accumulation_)
        no_sync.emplace(sharded_ ? sharded_->no_sync() : optimizer_->no_sync());
      const torch::data::Example<> batch(torch::randn({5, 6}, batches_),
                                         torch::randn({5, 3}, batches_));
      if (checked) {
        check_.run(step_, replayed(batch));
      } else {
        (loss_of(batch) * 8 / accumulation_).backward();
      }
    }
    sharded_ ? sharded_->step() : optimizer_->step();
  }

  std::vector<torch::Tensor> result() {
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& tensor : net_->parameters()) all.push_back(tensor.detach().clone());
    for (const torch::Tensor& tensor : net_->buffers()) all.push_back(tensor.clone());
    all.push_back(torch::randn({3}));  // of the stream that dropout uses
    all.push_back(torch::randn({3}, streams_.own("noise")));
    return all;
  }

  NoisyNet& net() { return net_; }
  torch::optim::Adam& adam() { return adam_; }

  /// Called with the output of each forward pass, and the number of passes of this step.
  std::function<void(torch::Tensor& output, int pass)> interfere;

 private:
  torch::Tensor loss_of(const torch::data::Example<>& batch) {
    torch::Tensor output = net_(batch.data);
    if (interfere) interfere(output, ++pass_);
    return torch::mse_loss(output, batch.target);
  }
  ReplayedBatch replayed(const torch::data::Example<>& batch) {
    pass_ = 0;
    return {
        .loss = [this, batch] { return loss_of(batch); },
        .backward = [this](const torch::Tensor& loss) { (loss * 8 / accumulation_).backward(); },
        .encode = [batch] { return libtorch::encode_batch(batch); },
        .loss_of_encoded =
            [this](std::string_view bytes) {
              return loss_of(libtorch::decode_batch<torch::data::Example<>>(bytes));
            }};
  }

  const int accumulation_;
  RandomStreams streams_{3};
  at::Generator batches_ = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank() + 1));
  NoisyNet net_{streams_};
  torch::optim::Adam adam_{net_->parameters(), 0.05};
  std::optional<DistributedOptimizer> optimizer_;
  std::optional<ShardedOptimizer> sharded_;
  ReplayCheck check_;
  std::int64_t step_ = 0;
  int pass_ = 0;
};

TEST(ReplayCheck, DoesNotChangeTheTraining) {
  for (const bool sharded : {false, true}) {
    for (const int accumulation : {1, 3}) {
      std::vector<std::vector<torch::Tensor>> results;
      for (const std::int64_t every : {0, 1, 2}) {
        torch::manual_seed(1);
        Training run(every, accumulation, sharded);
        for (int step = 0; step < 5; ++step) run.step();
        results.push_back(run.result());
      }
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
        EXPECT_TRUE(torch::equal(results[0][i], results[2][i])) << i;
      }
    }
  }
}

TEST(ReplayCheck, ComputesABatchTwiceAndOnceMore) {
  Training run(2);
  int passes = 0;
  run.interfere = [&](torch::Tensor&, int) { ++passes; };
  run.step();
  EXPECT_EQ(passes, 1);
  run.step();
  EXPECT_EQ(passes, size() == 1 ? 3 : 4);
}

/// The ranks of the error of the next step, the same on every rank.
std::pair<std::vector<int>, std::string> error_of(Training& run) {
  std::pair<std::vector<int>, std::string> found;
  try {
    run.step();
  } catch (const CorruptionError& error) {
    found = {error.ranks(), error.what()};
  }
  EXPECT_THAT(allgather_object(found.first), ::testing::Each(found.first));
  return found;
}

/// A bit of the gradient flips on rank `where` in one of its computations.
std::pair<std::vector<int>, std::string> flip_in_pass(int where, int pass) {
  Training run(1);
  run.step();
  run.interfere = [&](torch::Tensor& output, int at) {
    if (rank() == where && at == pass) {
      output.register_hook([](const torch::Tensor& gradient) {
        torch::Tensor other = gradient.clone();
        flip_bit(other);
        return other;
      });
    }
  };
  return error_of(run);
}

TEST(ReplayCheck, FindsABitOfTheGradientInItsOwnComputations) {
  const int where = size() - 1;
  for (const int pass : {1, 2}) {
    const auto [ranks, message] = flip_in_pass(where, pass);
    EXPECT_THAT(ranks, ElementsAre(where)) << message;
    EXPECT_THAT(message, HasSubstr("at step 2 rank " + std::to_string(where) +
                                   " has computed the gradient of 'first.weight' twice"));
    EXPECT_THAT(message, HasSubstr("from a checkpoint of step 1 or before"));
  }
}

TEST(ReplayCheck, FindsABitOfTheGradientOfThePreviousRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto [ranks, message] = flip_in_pass(1, 3);
  EXPECT_THAT(ranks, ElementsAre(1)) << message;
  EXPECT_THAT(message, HasSubstr("rank 1 has computed another gradient"));
}

TEST(ReplayCheck, FindsARankThatIsAlwaysWrong) {
  if (size() < 3) GTEST_SKIP() << "needs three ranks";
  Training run(1);
  run.interfere = [](torch::Tensor& output, int) {
    if (rank() == 1) output = output * (1 + 1e-6);
  };
  const auto [ranks, message] = error_of(run);
  EXPECT_THAT(ranks, ElementsAre(1)) << message;
  EXPECT_THAT(message, HasSubstr("than the ranks before and after"));
}

/// Rank 1 of three or more ranks; with two ranks it is impossible to find which one is at fault.
void expect_second(const std::pair<std::vector<int>, std::string>& error, const char* parameter) {
  const auto& [ranks, message] = error;
  if (size() == 1) {
    EXPECT_THAT(ranks, ElementsAre()) << "a single rank has no other to compare with";
  } else if (size() == 2) {
    EXPECT_THAT(ranks, ElementsAre(0, 1)) << message;
    EXPECT_THAT(message, HasSubstr("each of them may be at fault"));
  } else {
    EXPECT_THAT(ranks, ElementsAre(1)) << message;
    EXPECT_THAT(message, HasSubstr("the parameters of rank 1 differ from those of ranks 0 and 2"));
  }
  if (size() > 1) {
    EXPECT_THAT(message, HasSubstr(std::string("'") + parameter + "'"));
  }
}

TEST(ReplayCheck, FindsABitOfAWeight) {
  Training run(1);
  run.step();
  if (rank() == 1) flip_bit(run.net()->second->weight, 4);
  expect_second(error_of(run), "second.weight");
}

TEST(ReplayCheck, FindsABitOfTheOptimizersState) {
  Training run(2);
  run.step();
  if (rank() == 1) {
    auto& state = *run.adam().state().at(run.net()->norm->weight.unsafeGetTensorImpl());
    flip_bit(static_cast<torch::optim::AdamParamState&>(state).exp_avg(), 2);
  }
  EXPECT_THAT(error_of(run).first, ElementsAre()) << "it has not reached the parameters yet";
  run.step();
  expect_second(error_of(run), "norm.weight");
}

TEST(ReplayCheck, ComparesFrozenParametersToo) {
  Training run(1);
  run.net()->second->weight.set_requires_grad(false);
  if (rank() == 1) flip_bit(run.net()->second->weight);
  expect_second(error_of(run), "second.weight");
}

TEST(ReplayCheck, RefusesRanksThatRoundDifferently) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const int threads = at::get_num_threads();
  at::set_num_threads(rank() == 0 ? 1 : 2);
  NoisyNet net{RandomStreams(1)};
  const std::string message = message_of<MismatchError>([&] { ReplayCheck check(net.ptr(), 1); });
  at::set_num_threads(threads);
  EXPECT_THAT(message, HasSubstr("the number of LibTorch's threads differs: rank 0 has 1, rank 1 "
                                 "has 2; expected ranks that compute the same bits"));
}

struct SyncedImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return linear(norm(x)); }
  SyncBatchNorm1d norm = register_module("norm", SyncBatchNorm1d(6));
  nn::Linear linear = register_module("linear", nn::Linear(6, 2));
};
TORCH_MODULE(Synced);

TEST(ReplayCheck, RepeatsOnlyOnTheRankWithSyncBatchNorm) {
  torch::manual_seed(1);
  Synced net;
  broadcast_parameters(net);
  ReplayCheck check(net.ptr(), 1);
  const torch::Tensor batch = torch::randn({4, 6}) + rank();
  int replays = 0;
  check.run(1, {.loss = [&] { return net(batch).square().mean(); },
                .backward = [](const torch::Tensor& loss) { loss.backward(); },
                .encode = [&] { return libtorch::encode_batch(batch); },
                .loss_of_encoded =
                    [&](std::string_view bytes) {
                      ++replays;
                      return net(libtorch::decode_batch<torch::Tensor>(bytes)).square().mean();
                    }});
  EXPECT_EQ(replays, 1);
}

}  // namespace
}  // namespace hvd::testing
