#include <algorithm>
#include <numeric>
#include <utility>

#include "torch/support/torch_test.h"

// The samples of each rank of a loader, for any number of ranks in one process.

namespace hvd::testing {
namespace {

using libtorch::LoaderProgress;
using Indices = std::vector<std::size_t>;

/// The ranks of a job, which all use their batches.
class LoaderRanks {
 public:
  LoaderRanks(std::size_t dataset_size, std::size_t ranks, const DataLoaderOptions& options) {
    for (std::size_t r = 0; r < ranks; ++r) {
      progress_.push_back(std::make_shared<LoaderProgress>(dataset_size, options, r, ranks));
      samplers_.emplace_back(progress_.back());
    }
    for (auto& sampler : samplers_) sampler.reset();
    batch_size_ = static_cast<std::size_t>(options.batch_size);
  }

  /// The samples of the next batch of all ranks, interleaved; nullopt after the last batch.
  std::optional<Indices> step() {
    std::vector<Indices> own;
    bool any = false;
    for (std::size_t r = 0; r < progress_.size(); ++r) {
      const auto request = samplers_[r].next(batch_size_);
      any = any || request.has_value();
      own.push_back(request ? request->samples : Indices());
    }
    if (!any) return std::nullopt;
    for (const auto& progress : progress_) progress->use_batch();
    Indices dealt;
    for (std::size_t i = 0; i < own.front().size(); ++i) {
      for (const Indices& samples : own) {
        if (i < samples.size()) dealt.push_back(samples[i]);
      }
    }
    return dealt;
  }
  Indices all() {
    Indices dealt;
    while (const auto step = this->step()) dealt.insert(dealt.end(), step->begin(), step->end());
    return dealt;
  }
  LoaderProgress& operator[](std::size_t rank) { return *progress_[rank]; }

 private:
  std::vector<std::shared_ptr<LoaderProgress>> progress_;
  std::vector<libtorch::LoaderSampler> samplers_;
  std::size_t batch_size_ = 0;
};

DataLoaderOptions in_order(Remainder remainder, std::int64_t batch_size) {
  return {.batch_size = batch_size, .shuffle = false, .remainder = remainder};
}

TEST(LoaderProgress, PadsDropsOrDealsOutTheRemainder) {
  for (const std::size_t n : {0U, 1U, 2U, 3U, 7U, 10U, 11U, 64U}) {
    for (const std::size_t ranks : {1U, 2U, 3U, 4U, 5U}) {
      for (const std::int64_t batch_size : {1, 3, 100}) {
        SCOPED_TRACE(std::to_string(n) + " on " + std::to_string(ranks));
        const auto count = [&](Remainder remainder) {
          LoaderRanks job(n, ranks, in_order(remainder, batch_size));
          const Indices all = job.all();
          for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], i % n);
          for (std::size_t r = 0; r < ranks; ++r) {
            EXPECT_EQ(job[r].samples_used(), all.size());
            EXPECT_EQ(job[r].samples_left(), 0U);
          }
          return all.size();
        };
        EXPECT_EQ(count(Remainder::kPad), (n + ranks - 1) / ranks * ranks);
        EXPECT_EQ(count(Remainder::kDrop), n / ranks * ranks);
        EXPECT_EQ(count(Remainder::kUneven), n);
      }
    }
  }
}

TEST(LoaderProgress, AnotherNumberOfRanksGoesOnWithUnusedSamples) {
  constexpr std::size_t kSize = 29;
  for (const Remainder remainder : {Remainder::kPad, Remainder::kDrop, Remainder::kUneven}) {
    for (std::size_t before = 1; before <= 4; ++before) {
      for (std::size_t after = 1; after <= 5; ++after) {
        for (int steps = 0; steps < 4; ++steps) {
          SCOPED_TRACE(std::to_string(before) + " then " + std::to_string(after));
          const DataLoaderOptions options{.batch_size = 2, .seed = 5, .remainder = remainder};
          LoaderRanks first(kSize, before, options);
          Indices used;
          for (int i = 0; i < steps; ++i) {
            const auto step = first.step();
            if (step) used.insert(used.end(), step->begin(), step->end());
          }
          torch::serialize::OutputArchive out;
          first[0].save(out);
          std::stringstream stream;
          out.save_to(stream);
          torch::serialize::InputArchive in;
          in.load_from(stream);
          // The batch size differs too.
          LoaderRanks second(kSize, after, {.batch_size = 3, .seed = 5, .remainder = remainder});
          Indices rest;
          for (std::size_t r = 0; r < after; ++r) second[r].load(in);
          const std::size_t left = kSize - std::min(kSize, used.size());
          std::vector<Indices> own;
          for (std::size_t r = 0; r < after; ++r) own.push_back(second[r].samples());
          for (std::size_t i = 0; i < own[0].size(); ++i) {
            for (const Indices& samples : own) {
              if (i < samples.size()) rest.push_back(samples[i]);
            }
          }
          const std::size_t expected = remainder == Remainder::kPad
                                           ? (left + after - 1) / after * after
                                       : remainder == Remainder::kDrop ? left / after * after
                                                                       : left;
          EXPECT_EQ(rest.size(), expected);
          rest.resize(std::min(rest.size(), left));  // without repeated samples
          used.resize(std::min(used.size(), kSize));
          used.insert(used.end(), rest.begin(), rest.end());
          std::sort(used.begin(), used.end());
          EXPECT_EQ(std::adjacent_find(used.begin(), used.end()), used.end()) << "one used twice";
          if (remainder != Remainder::kDrop) {
            EXPECT_EQ(used.size(), kSize);
          }
        }
      }
    }
  }
}

TEST(LoaderProgress, CountsBatchesThatAreLeft) {
  LoaderProgress progress(10, {.batch_size = 3, .shuffle = false}, 1, 2);
  EXPECT_EQ(progress.samples_left(), 5U);
  EXPECT_EQ(progress.batches_left(), 2U);
  EXPECT_EQ(progress.samples(), (Indices{1, 3, 5, 7, 9}));
  progress.use_batch();
  EXPECT_EQ(progress.samples_used(), 6U);
  EXPECT_EQ(progress.batches_left(), 1U);
  EXPECT_EQ(progress.samples(), (Indices{7, 9}));
  progress.end_epoch();
  EXPECT_EQ(progress.epoch(), 1U);
  EXPECT_EQ(progress.samples_used(), 0U);
  LoaderProgress full(10, {.batch_size = 3, .drop_last = true}, 1, 2);
  EXPECT_EQ(full.batches_left(), 1U);
}

TEST(LoaderProgress, RefusesAStateThatIsNotItsOwnAndKeepsItsPosition) {
  const auto state_of = [](std::size_t samples, const DataLoaderOptions& options) {
    LoaderProgress progress(samples, options, 0, 1);
    progress.use_batch();
    std::stringstream stream;
    torch::serialize::OutputArchive archive;
    progress.save(archive);
    archive.save_to(stream);
    return stream.str();
  };
  LoaderProgress progress(20, {.batch_size = 4, .seed = 1}, 0, 1);
  progress.set_epoch(2);
  progress.use_batch();
  const auto refusal = [&](const std::string& bytes) {
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size());
    const std::string message = message_of<UsageError>([&] { progress.load(archive); });
    EXPECT_EQ(progress.epoch(), 2U);
    EXPECT_EQ(progress.samples_used(), 4U);
    return message;
  };
  EXPECT_PRED2(contains, refusal(state_of(21, {.seed = 1})), "21 samples shuffled with seed 1");
  EXPECT_PRED2(contains, refusal(state_of(20, {.seed = 7})), "20 samples shuffled with seed 7");
  EXPECT_PRED2(contains, refusal(state_of(20, {.shuffle = false, .seed = 1})), "in order");
  std::stringstream other;
  torch::save(torch::ones(3), other);
  EXPECT_PRED2(contains, refusal(other.str()), "no state of a data loader");
  torch::serialize::OutputArchive newer;
  newer.write("hvd_data_loader", torch::tensor({2, 20, 1, 1, 0, 0}, torch::kInt64), true);
  std::stringstream stream;
  newer.save_to(stream);
  EXPECT_PRED2(contains, refusal(stream.str()), "version 1");
  torch::serialize::OutputArchive damaged;
  damaged.write("hvd_data_loader", torch::tensor({1, 20, 1, 1, 0, -4}, torch::kInt64), true);
  std::stringstream bad;
  damaged.save_to(bad);
  EXPECT_PRED2(contains, refusal(bad.str()), "damaged");

  torch::serialize::InputArchive archive;
  const std::string good = state_of(20, {.batch_size = 7, .seed = 1});
  archive.load_from(good.data(), good.size());
  progress.load(archive);
  EXPECT_EQ(progress.epoch(), 0U);
  EXPECT_EQ(progress.samples_used(), 7U);
}

}  // namespace
}  // namespace hvd::testing
