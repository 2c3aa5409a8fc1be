#include "hvd/torch/sample_order.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>

#include "torch/support/torch_test.h"

// Loaders with orders of the program's own.

namespace hvd::testing {
namespace {

namespace data = torch::data;

/// A batch has the numbers of its samples.
class Numbers : public data::datasets::BatchDataset<Numbers, std::vector<std::size_t>> {
 public:
  explicit Numbers(std::size_t size) : size_(size) {}
  std::vector<std::size_t> get_batch(c10::ArrayRef<std::size_t> indices) override {
    return indices.vec();
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

/// The samples of all ranks in one epoch, in their common order.
template <class Loader>
std::vector<std::size_t> epoch_of_all(Loader& loader) {
  std::vector<std::size_t> own;
  for (auto& batch : loader) own.insert(own.end(), batch.begin(), batch.end());
  const auto all = allgather_object(own);
  std::vector<std::size_t> together;
  for (std::size_t i = 0; i < all.front().size(); ++i) {
    for (const auto& of_rank : all) {
      if (i < of_rank.size()) together.push_back(of_rank[i]);
    }
  }
  return together;
}

TEST(SampleOrder, ALoaderSharesOutAnOrderOfTheProgramsOwn) {
  const auto order = [](std::size_t epoch) {
    std::vector<std::size_t> samples(30);
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i] = (7 * i + epoch) % 11;
    return samples;
  };
  const DataLoaderOptions options{.batch_size = 3,
                                  .workers = 1,
                                  .remainder = Remainder::kUneven,
                                  .order = order,
                                  .samples_per_epoch = 30};
  auto loader = make_data_loader(Numbers(11), options);
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    EXPECT_EQ(epoch_of_all(*loader), order(epoch)) << epoch;
    barrier();
  }
  // Resumes in the middle of an epoch.
  auto stopped = make_data_loader(Numbers(11), options);
  std::vector<std::size_t> first = *stopped->begin();
  torch::serialize::OutputArchive saved;
  stopped->save(saved);
  std::stringstream bytes;
  saved.save_to(bytes);
  auto resumed = make_data_loader(Numbers(11), options);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  resumed->load(archive);
  std::vector<std::size_t> rest = order(0);
  rest.erase(rest.begin(), rest.begin() + 3 * size());
  EXPECT_EQ(epoch_of_all(*resumed), rest);
  auto other = make_data_loader(Numbers(30), {.batch_size = 3, .remainder = Remainder::kUneven});
  EXPECT_THROW(other->load(archive), UsageError);
}

TEST(SampleOrder, AnInvalidOrderIsAnErrorOnEveryRank) {
  const auto error_of = [](DataLoaderOptions options) {
    auto loader = make_data_loader(Numbers(4), std::move(options));
    return message_of<UsageError>([&] { loader->begin(); });
  };
  const auto gives = [](std::vector<std::size_t> samples) {
    return [samples](std::size_t /*epoch*/) { return samples; };
  };
  EXPECT_PRED2(contains, error_of({.order = gives({0, 1})}), "expected 4 samples in each epoch");
  EXPECT_PRED2(contains, error_of({.order = gives({0, 1, 2, 4})}), "expected samples below 4");
  EXPECT_PRED2(contains, error_of({.order = gives({}), .samples_per_epoch = 1}),
               "got 0 in epoch 0");
  EXPECT_THROW(make_data_loader(Numbers(4), {.samples_per_epoch = 3}), UsageError);
  if (size() < 2) return;
  auto differs =
      make_data_loader(Numbers(2), {.order = gives(rank() == 1 ? std::vector<std::size_t>{1, 0}
                                                               : std::vector<std::size_t>{0, 1})});
  EXPECT_THROW(differs->begin(), MismatchError);
}

TEST(SampleOrder, WeightedDrawsFollowTheWeights) {
  constexpr std::size_t kDraws = 20000;
  const std::vector<double> weights{0, 1, 0, 3, 6, 0};
  const SampleOrder order = weighted_order(weights, kDraws, 5);
  const auto samples = order(2);
  EXPECT_EQ(samples, order(2));
  EXPECT_NE(samples, order(3));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto drawn = static_cast<double>(std::count(samples.begin(), samples.end(), i));
    EXPECT_NEAR(drawn / kDraws, weights[i] / 10, 0.02) << i;
    if (weights[i] == 0) {
      EXPECT_EQ(drawn, 0);
    }
  }
  EXPECT_THROW(weighted_order({1, -1}, 1), UsageError);
  EXPECT_THROW(weighted_order({0, 0}, 1), UsageError);
  EXPECT_THROW(weighted_order({}, 1), UsageError);
}

TEST(SampleOrder, BatchesByLengthHaveEachSampleOnceAndLittlePadding) {
  std::vector<std::size_t> lengths(1003);
  for (std::size_t i = 0; i < lengths.size(); ++i) lengths[i] = 1 + i * 7919 % 500;
  constexpr std::size_t kBatch = 10;
  const SampleOrder order = order_by_length(lengths, kBatch, 1);
  const auto padding_of = [&](const std::vector<std::size_t>& samples) {
    std::size_t padding = 0;
    for (std::size_t begin = 0; begin + kBatch <= samples.size(); begin += kBatch) {
      std::size_t longest = 0, sum = 0;
      for (std::size_t i = begin; i < begin + kBatch; ++i) {
        longest = std::max(longest, lengths[samples[i]]);
        sum += lengths[samples[i]];
      }
      padding += longest * kBatch - sum;
    }
    return padding;
  };
  std::vector<std::size_t> in_order(lengths.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  const auto samples = order(0);
  EXPECT_NE(samples, order(1));
  EXPECT_LT(padding_of(samples) * 10, padding_of(in_order));
  EXPECT_EQ(std::set<std::size_t>(samples.begin(), samples.end()).size(), lengths.size());
  EXPECT_EQ(samples.size(), lengths.size());
  // Batches of different lengths are mixed.
  EXPECT_FALSE(std::is_sorted(samples.begin(), samples.end(), [&](std::size_t a, std::size_t b) {
    return lengths[a] / 50 < lengths[b] / 50;
  }));
  EXPECT_THROW(order_by_length({1}, 0), UsageError);
}

class KeepWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;
};

TEST(SampleOrder, AnEpochWithoutABatchIsAWarning) {
  const auto n = static_cast<std::size_t>(size());
  const auto warning_of = [](std::size_t samples, const DataLoaderOptions& options) {
    KeepWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    auto loader = make_data_loader(Numbers(samples), options);
    int batches = 0;
    for (auto& batch : *loader) batches += batch.empty() ? 0 : 1;
    if (rank() == 0) {
      EXPECT_EQ(batches == 0, !warnings.text.empty()) << warnings.text;
    }
    return warnings.text;
  };
  const auto expect = [&](bool warns, const std::string& text) {
    EXPECT_EQ(contains(text, "has no batch in any epoch"), warns && rank() == 0) << text;
  };
  expect(true, warning_of(0, {}));
  expect(false, warning_of(1, {}));
  expect(true, warning_of(n * 4 - 1,
                          {.batch_size = 4, .remainder = Remainder::kDrop, .drop_last = true}));
  expect(false,
         warning_of(n * 4, {.batch_size = 4, .remainder = Remainder::kDrop, .drop_last = true}));
  if (n > 1) expect(true, warning_of(n - 1, {.remainder = Remainder::kDrop}));
}

}  // namespace
}  // namespace hvd::testing
