// The shares and positions of elastic::Sampler, and of a loader with a global_batch.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using Indices = std::vector<std::size_t>;

Indices numbers(const torch::Tensor& tensor) {
  Indices all;
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    all.push_back(static_cast<std::size_t>(tensor[i].item<std::int64_t>()));
  return all;
}

/// The samples of all ranks in a step. Collective.
Indices of_all_ranks(const Indices& own) {
  const std::vector<std::int64_t> values(own.begin(), own.end());
  return numbers(allgather(torch::tensor(values, torch::kInt64)));
}

std::size_t steps(std::size_t samples, std::size_t step) { return (samples + step - 1) / step; }

TEST(ElasticSampler, EachSampleOfAnEpochIsInOneStep) {
  constexpr std::size_t kSamples = 50;
  elastic::Sampler sampler(kSamples, {.global_batch = 9, .seed = 4});
  std::vector<Indices> epochs;
  for (; sampler.epoch() < 2; sampler.set_epoch(sampler.epoch() + 1)) {
    Indices all;
    std::size_t count = 0;
    while (const auto own = sampler.next()) {
      ++count;
      const Indices together = of_all_ranks(*own);
      EXPECT_EQ(together.size(),
                std::max<std::size_t>(std::min<std::size_t>(9, kSamples - all.size()),
                                      static_cast<std::size_t>(size())));
      const auto least =
          static_cast<std::size_t>(together.size() / static_cast<std::size_t>(size()));
      EXPECT_GE(own->size(), least);
      EXPECT_LE(own->size(), least + 1);
      all.insert(all.end(), together.begin(), together.end());
    }
    EXPECT_EQ(count, steps(kSamples, 9));
    EXPECT_EQ(sampler.samples_used(), kSamples);
    epochs.push_back(all);
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    EXPECT_EQ(all.size(), kSamples);
  }
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST(ElasticSampler, AFixedBatchPerRankGrowsWithTheRanks) {
  const auto ranks = static_cast<std::size_t>(size());
  elastic::Sampler sampler(6 * ranks + 1, {.batch = 3, .shuffle = false, .drop_last = true});
  std::size_t count = 0;
  while (const auto own = sampler.next()) {
    ASSERT_EQ(own->size(), 3U);
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_EQ((*own)[i], (3 * count + i) * ranks + static_cast<std::size_t>(rank()));
    ++count;
  }
  EXPECT_EQ(count, 2U);
  sampler.set_epoch(0);
  EXPECT_FALSE(sampler.next()) << "the same epoch goes on";
  sampler.set_epoch(1);
  EXPECT_TRUE(sampler.next());
}

TEST(ElasticSampler, WrongOptionsAreUsageErrors) {
  EXPECT_THROW(elastic::Sampler(10, {}), UsageError);
  EXPECT_THROW(elastic::Sampler(10, {.batch = 1, .global_batch = 1}), UsageError);
  EXPECT_THROW(elastic::Sampler(0, {.batch = 1}), UsageError);
  if (size() == 1) return;
  elastic::Sampler small(10, {.global_batch = 1});
  EXPECT_THROW(small.next(), UsageError);
}

/// The ranks of a job in one process, whose number may change.
struct LoaderRanks {
  LoaderRanks(std::size_t samples, std::size_t ranks, const DataLoaderOptions& options) {
    for (std::size_t r = 0; r < ranks; ++r) {
      progress.push_back(std::make_shared<libtorch::LoaderProgress>(samples, options, r, ranks));
      samplers.emplace_back(progress.back());
    }
  }
  /// Up to `most` steps.
  std::vector<Indices> run(std::size_t most) {
    for (auto& sampler : samplers) sampler.reset();
    std::vector<Indices> all;
    while (all.size() < most) {
      Indices step;
      const libtorch::BatchPlace place = progress.front()->next_batch();
      for (std::size_t r = 0; r < samplers.size(); ++r) {
        const auto request = samplers[r].next(1);
        if (!request) continue;
        EXPECT_EQ(request->size(), place.sizes[r]);
        step.insert(step.end(), request->samples.begin(), request->samples.end());
      }
      if (step.empty()) return all;
      for (const auto& one : progress) one->use_batch();
      all.push_back(step);
    }
    return all;
  }
  void continue_from(const LoaderRanks& other) {
    torch::serialize::OutputArchive out;
    other.progress.front()->save(out);
    std::stringstream bytes;
    out.save_to(bytes);
    for (const auto& one : progress) {
      torch::serialize::InputArchive in;
      bytes.seekg(0);
      in.load_from(bytes);
      one->load(in);
    }
  }
  std::vector<std::shared_ptr<libtorch::LoaderProgress>> progress;
  std::vector<libtorch::LoaderSampler> samplers;
};

TEST(GlobalBatch, EachStepHasTheSameSamplesOnAnyNumberOfRanks) {
  for (const std::size_t samples : {7U, 40U, 41U, 43U}) {
    const DataLoaderOptions options{.global_batch = 8, .seed = 5};
    std::vector<Indices> expected;
    for (const std::size_t ranks : {1U, 2U, 3U, 4U}) {
      SCOPED_TRACE(std::to_string(samples) + " on " + std::to_string(ranks));
      LoaderRanks job(samples, ranks, options);
      EXPECT_EQ(job.progress.front()->batches_left(), steps(samples, 8));
      std::vector<Indices> all = job.run(100);
      ASSERT_EQ(all.size(), steps(samples, 8));
      for (Indices& step : all) {
        std::sort(step.begin(), step.end());
        step.erase(std::unique(step.begin(), step.end()), step.end());
      }
      if (ranks == 1) expected = all;
      // A last step of fewer samples than ranks repeats some.
      if (samples % 8 != 0 && samples % 8 < ranks) all.back() = expected.back();
      EXPECT_EQ(all, expected);
      EXPECT_EQ(job.progress.front()->batches_left(), 0U);
    }
  }
}

TEST(GlobalBatch, AnEpochGoesOnWithAnotherNumberOfRanks) {
  const DataLoaderOptions options{.global_batch = 10, .seed = 5, .remainder = Remainder::kDrop};
  LoaderRanks four(96, 4, options), three(96, 3, options), six(96, 6, options);
  Indices all;
  const auto take = [&all](LoaderRanks& ranks, std::size_t most) {
    for (const Indices& step : ranks.run(most)) {
      EXPECT_EQ(step.size(), 10U);
      all.insert(all.end(), step.begin(), step.end());
    }
  };
  take(four, 3);
  three.continue_from(four);
  take(three, 2);
  six.continue_from(three);
  take(six, 100);
  EXPECT_EQ(all.size(), 90U);
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
}

struct Numbers : torch::data::BatchDataset<Numbers, Indices> {
  Indices get_batch(c10::ArrayRef<std::size_t> samples) override { return samples.vec(); }
  std::optional<std::size_t> size() const override { return 50; }
};

TEST(GlobalBatch, ALoaderWithWorkersUsesEachSampleOnce) {
  const auto loader = make_data_loader(Numbers(), {.global_batch = 8, .workers = 2, .seed = 1});
  Indices all;
  for (auto& batch : *loader) {
    const Indices together = of_all_ranks(batch);
    all.insert(all.end(), together.begin(), together.end());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  EXPECT_EQ(all.size(), 50U);
  EXPECT_THROW(make_data_loader(Numbers(), {.batch_size = 2, .global_batch = 8}), UsageError);
  EXPECT_THROW(make_data_loader(Numbers(), {.global_batch = 8, .remainder = Remainder::kUneven}),
               UsageError);
  EXPECT_THROW(make_data_loader(Numbers(), {.global_batch = -1}), UsageError);
}

}  // namespace
}  // namespace hvd::testing
