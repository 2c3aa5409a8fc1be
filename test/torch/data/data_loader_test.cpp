#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using Indices = std::vector<std::size_t>;
namespace data = torch::data;

/// The samples are their indices. The target is the first number of the sample's generator.
class CountingDataset : public data::datasets::Dataset<CountingDataset> {
 public:
  explicit CountingDataset(std::size_t size) : size_(size) {}
  data::Example<> get(std::size_t index) override {
    return {torch::tensor(static_cast<std::int64_t>(index)),
            torch::rand({3}, sample_generator(index))};
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

struct UnsizedDataset : data::datasets::Dataset<UnsizedDataset> {
  data::Example<> get(std::size_t) override { return {torch::zeros(1), torch::zeros(1)}; }
  std::optional<std::size_t> size() const override { return std::nullopt; }
};

Indices indices_of(const std::vector<data::Example<>>& batch) {
  Indices indices;
  for (const auto& example : batch)
    indices.push_back(static_cast<std::size_t>(example.data.item<std::int64_t>()));
  return indices;
}

template <class Loader>
std::vector<Indices> epoch_of(Loader& loader) {
  std::vector<Indices> batches;
  for (auto& batch : loader) batches.push_back(indices_of(batch));
  return batches;
}

TEST(DataLoader, VisitsSamplesInTheOrderOfPyTorchsSampler) {
  for (const bool drop : {false, true}) {
    DistributedSampler sampler(47, {.seed = 2, .drop_last = drop});
    auto loader = make_data_loader(CountingDataset(47),
                                   {.batch_size = 4,
                                    .workers = 2,
                                    .seed = 2,
                                    .remainder = drop ? Remainder::kDrop : Remainder::kPad});
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      EXPECT_EQ(loader->epoch(), epoch);
      sampler.set_epoch(epoch);
      sampler.reset();
      std::vector<Indices> expected;
      while (const auto batch = sampler.next(4)) expected.push_back(*batch);
      EXPECT_EQ(loader->batches_left(), expected.size());
      EXPECT_EQ(epoch_of(*loader), expected);
    }
  }
  // torch.randperm(10) with torch.Generator().manual_seed(5), in PyTorch itself.
  const Indices order{1, 4, 9, 6, 3, 5, 0, 2, 8, 7};
  auto loader = make_data_loader(CountingDataset(10), {.seed = 2});
  loader->set_epoch(3);
  const auto own = epoch_of(*loader);
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::size_t place =
        static_cast<std::size_t>(rank()) + i * static_cast<std::size_t>(size());
    EXPECT_EQ(own[i], Indices{order[place % 10]});
  }
}

TEST(DataLoader, WorkersChangeNothing) {
  const auto batches_of = [](std::int64_t workers, std::optional<std::int64_t> max_jobs = {}) {
    auto noise = [](data::Example<> example, at::Generator& generator) {
      example.target = example.target + torch::randn({3}, generator);
      return example;
    };
    auto loader =
        make_data_loader(CountingDataset(53)
                             .map(random_transform(noise))
                             .map(random_transform(noise))
                             .map(data::transforms::Stack<>()),
                         {.batch_size = 5, .workers = workers, .max_jobs = max_jobs, .seed = 9});
    std::vector<torch::Tensor> batches;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : *loader) {
        batches.push_back(batch.data);
        batches.push_back(batch.target);
      }
    }
    return batches;
  };
  const auto alone = batches_of(0);
  for (const auto& others : {batches_of(1), batches_of(3), batches_of(3, 1), batches_of(2, 50)}) {
    ASSERT_EQ(others.size(), alone.size());
    for (std::size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(others[i].equal(alone[i])) << i;
  }
}

TEST(SampleGenerator, BelongsToSeedEpochAndSampleAlone) {
  auto loader = make_data_loader(
      CountingDataset(20).map(
          random_transform([](data::Example<> example, at::Generator& generator) {
            example.target = torch::cat({example.target, torch::rand({2}, generator)});
            return example;
          })),
      {.batch_size = 3, .workers = 2, .seed = 4});
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : *loader) {
      for (auto& example : batch) {
        const auto sample = static_cast<std::uint64_t>(example.data.item<std::int64_t>());
        const at::Generator generator = sample_generator(4, epoch, sample);
        const torch::Tensor drawn = torch::rand({3}, generator);
        // The transform continues with the generator of get(), unless padding has repeated the
        // sample.
        EXPECT_TRUE(example.target.slice(0, 0, 3).equal(drawn));
        EXPECT_TRUE(example.target.slice(0, 3).equal(torch::rand({2}, generator)));
      }
    }
  }
  const auto first = [](std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample) {
    return torch::randint(1LL << 40, {1}, sample_generator(seed, epoch, sample))
        .item<std::int64_t>();
  };
  std::vector<std::int64_t> numbers;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t epoch = 0; epoch < 10; ++epoch) {
      for (std::uint64_t sample = 0; sample < 10; ++sample)
        numbers.push_back(first(seed, epoch, sample));
    }
  }
  numbers.push_back(first(0, 0, 1ULL << 32));  // LibTorch's own seeds have 32 bits
  numbers.push_back(first(1ULL << 32, 0, 0));
  EXPECT_EQ(first(3, 4, 5), numbers[345]);
  double mean = 0;
  for (const std::int64_t number : numbers)
    mean += static_cast<double>(number) / static_cast<double>(1LL << 40);
  EXPECT_NEAR(mean / static_cast<double>(numbers.size()), 0.5, 0.05);
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(std::adjacent_find(numbers.begin(), numbers.end()), numbers.end());
}

TEST(SampleGenerator, IsRefusedOutsideALoaderAndForOtherSamples) {
  EXPECT_PRED2(contains, message_of<UsageError>([] { sample_generator(std::size_t{3}); }),
               "make_data_loader");
  const std::vector<std::size_t> samples{7, 8};
  const libtorch::SampleScope scope(0, 0, samples);
  EXPECT_TRUE(sample_generator(std::size_t{8}).defined());
  EXPECT_PRED2(contains, message_of<UsageError>([] { sample_generator(std::size_t{3}); }),
               "sample 3 is not in the batch");
  RandomTransform transform =
      random_transform([](data::Example<> example, at::Generator&) { return example; });
  EXPECT_PRED2(contains,
               message_of<UsageError>([&] { transform.apply_batch({data::Example<>()}); }),
               "got 1 examples");
}

TEST(DataLoader, CountsUsedBatchesOnly) {
  const auto ranks = static_cast<std::size_t>(size());
  for (const std::int64_t workers : {0, 3}) {
    auto loader =
        make_data_loader(CountingDataset(12 * ranks), {.batch_size = 2, .workers = workers});
    auto batch = loader->begin();
    EXPECT_EQ(loader->samples_used(), 0U);
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_FALSE(batch == loader->end());  // loads the batch
      EXPECT_EQ(loader->samples_used(), 2 * ranks * i);
      const std::size_t examples = batch->size();
      EXPECT_EQ((*batch).size(), examples);
      EXPECT_EQ(loader->samples_used(), 2 * ranks * (i + 1));
      EXPECT_EQ(loader->batches_left(), 5 - i);
      EXPECT_EQ(loader->epoch(), 0U);
      ++batch;
    }
    EXPECT_TRUE(batch == loader->end());
    EXPECT_EQ(loader->epoch(), 1U);
    EXPECT_EQ(loader->samples_used(), 0U);
    EXPECT_TRUE(batch == loader->end());
    EXPECT_THROW(++batch, c10::Error);
    // A skipped batch counts as used too.
    auto other = loader->begin();
    ++other;
    EXPECT_EQ(loader->samples_used(), 2 * ranks);
  }
}

TEST(DataLoader, GoesOnAfterABreakAndStartsAgainInAnotherEpoch) {
  for (const std::int64_t workers : {0, 2}) {
    auto loader = make_data_loader(CountingDataset(40), {.batch_size = 3, .workers = workers});
    auto whole = make_data_loader(CountingDataset(40), {.batch_size = 3});
    const auto expected = epoch_of(*whole);
    std::vector<Indices> seen;
    for (auto& batch : *loader) {
      seen.push_back(indices_of(batch));
      if (seen.size() == 2) break;
    }
    loader->set_epoch(0);  // the current epoch
    const auto rest = epoch_of(*loader);
    seen.insert(seen.end(), rest.begin(), rest.end());
    EXPECT_EQ(seen, expected);
    loader->set_epoch(0);
    EXPECT_EQ(epoch_of(*loader), expected);
    EXPECT_EQ(loader->epoch(), 1U);

    auto stale = loader->begin();
    EXPECT_EQ(stale->size(), 3U);
    loader->set_epoch(5);
    EXPECT_PRED2(contains, message_of<UsageError>([&] { ++stale; }), "later begin()");
    EXPECT_EQ(loader->samples_used(), 0U);
  }
}

/// Fails from one sample on until it is repaired.
struct FailingDataset : data::datasets::Dataset<FailingDataset> {
  std::shared_ptr<std::atomic<bool>> broken;
  std::size_t samples = 0, from = 0;

  data::Example<> get(std::size_t index) override {
    if (index >= from && *broken) throw std::runtime_error("cannot read the sample");
    return {torch::tensor(static_cast<std::int64_t>(index)), torch::Tensor()};
  }
  std::optional<std::size_t> size() const override { return samples; }
};

TEST(DataLoader, ExceptionsOfADataSetReachTheProgram) {
  for (const std::int64_t workers : {0, 2}) {
    const auto broken = std::make_shared<std::atomic<bool>>(true);
    const auto ranks = static_cast<std::size_t>(size());
    FailingDataset dataset;
    dataset.broken = broken;
    dataset.samples = 10 * ranks;
    dataset.from = 4 * ranks;
    auto loader =
        make_data_loader(dataset, {.batch_size = 2, .workers = workers, .shuffle = false});
    auto batch = loader->begin();
    EXPECT_EQ(batch->size(), 2U);
    ++batch;
    EXPECT_EQ(batch->size(), 2U);
    const auto next = [&] { ++batch; };
    EXPECT_PRED2(contains,
                 workers == 0 ? message_of<std::runtime_error>(next)
                              : message_of<data::WorkerException>(next),
                 "cannot read the sample");
    EXPECT_EQ(loader->samples_used(), 4 * ranks);
    EXPECT_THROW(++batch, UsageError);
    *broken = false;
    Indices rest;
    for (const Indices& indices : epoch_of(*loader)) {
      rest.insert(rest.end(), indices.begin(), indices.end());
    }
    EXPECT_EQ(rest.size(), 6U);
    EXPECT_EQ(rest.front(), 4 * ranks + static_cast<std::size_t>(rank()));
  }
}

TEST(DataLoader, DropsALastBatchThatIsNotFull) {
  const auto ranks = static_cast<std::size_t>(size());
  auto loader = make_data_loader(CountingDataset(11 * ranks),
                                 {.batch_size = 3, .workers = 1, .drop_last = true});
  const auto batches = epoch_of(*loader);
  EXPECT_EQ(batches.size(), 3U);
  for (const Indices& batch : batches) EXPECT_EQ(batch.size(), 3U);
  EXPECT_EQ(loader->epoch(), 1U);
}

TEST(DataLoader, UnevenRemaindersUseEachSampleOnceAndEndWithAJoin) {
  const auto ranks = static_cast<std::size_t>(size());
  const std::size_t samples = 6 * ranks + 1;  // one batch more on rank 0
  auto loader = make_data_loader(CountingDataset(samples),
                                 {.batch_size = 2, .workers = 2, .remainder = Remainder::kUneven});
  for (int epoch = 0; epoch < 2; ++epoch) {
    Indices own;
    std::size_t steps = 0;
    for (auto& batch : *loader) {
      const Indices indices = indices_of(batch);
      own.insert(own.end(), indices.begin(), indices.end());
      ++steps;
      const auto have = allreduce(torch::ones({}), {.name = "step", .op = ReduceOp::kSum});
      EXPECT_EQ(have.item<float>(), steps == 4 ? 1 : static_cast<float>(ranks));
    }
    EXPECT_EQ(steps, rank() == 0 ? 4U : 3U);
    EXPECT_EQ(join(), 0);
    Indices all;
    for (const Indices& part : allgather_object(own))
      all.insert(all.end(), part.begin(), part.end());
    std::sort(all.begin(), all.end());
    Indices expected(samples);
    std::iota(expected.begin(), expected.end(), 0U);
    EXPECT_EQ(all, expected);
  }
}

TEST(DataLoader, SharesTheDataSetAmongTheMembersOfAProcessSet) {
  for_each_set([](const ProcessSet& set) {
    auto loader = make_data_loader(CountingDataset(10),
                                   {.batch_size = 100, .shuffle = false, .process_set = set});
    const auto batches = epoch_of(*loader);
    ASSERT_EQ(batches.size(), 1U);
    EXPECT_EQ(batches[0].front(), static_cast<std::size_t>(set.rank()));
    EXPECT_EQ(batches[0].size(), static_cast<std::size_t>((10 + set.size() - 1) / set.size()));
  });
  if (size() == 1) return;
  const ProcessSet first = add_process_set({0});
  if (rank() != 0) {
    EXPECT_PRED2(contains, message_of<UsageError>([&] {
                   make_data_loader(CountingDataset(10), {.process_set = first});
                 }),
                 "rank " + std::to_string(rank()) + " is not in process set " +
                     std::to_string(first.id()) + " (rank 0); only its members take part");
  }
  remove_process_set(first);
}

TEST(DataLoader, RefusesOptionsThatMeanNothing) {
  const auto refusal = [](DataLoaderOptions options) {
    return message_of<UsageError>([&] { make_data_loader(CountingDataset(10), options); });
  };
  EXPECT_PRED2(contains, refusal({.batch_size = 0}),
               "data_loader: batch_size: expected at least 1, got 0");
  EXPECT_PRED2(contains, refusal({.batch_size = -3}), "got -3");
  EXPECT_PRED2(contains, refusal({.workers = -1, .name = "train"}),
               "train: workers: expected at least 0, got -1");
  EXPECT_PRED2(contains, refusal({.max_jobs = 0}), "max_jobs: expected at least 1, got 0");
  EXPECT_PRED2(contains, message_of<UsageError>([] { make_data_loader(UnsizedDataset()); }),
               "has no size");
}

TEST(DataLoader, RanksThatDifferAreNamedOnEveryRank) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const bool odd = rank() == 1;
  EXPECT_PRED2(contains,
               message_of<MismatchError>([&] { make_data_loader(CountingDataset(odd ? 11 : 10)); }),
               "rank 1 has 11 samples shuffled with seed 0, batch_size 1, remainder pad");
  EXPECT_PRED2(contains, message_of<MismatchError>([&] {
                 make_data_loader(CountingDataset(10), {.batch_size = odd ? 3 : 2});
               }),
               "batch_size 3");
  EXPECT_PRED2(contains, message_of<MismatchError>([&] {
                 make_data_loader(CountingDataset(10), {.drop_last = odd});
               }),
               "remainder pad, drop_last; expected the same on every rank");
  const DataLoaderOptions wrong{.workers = odd ? -1 : 1};
  if (odd) {
    EXPECT_THROW(make_data_loader(CountingDataset(10), wrong), UsageError);
  } else {
    EXPECT_PRED2(contains,
                 message_of<MismatchError>([&] { make_data_loader(CountingDataset(10), wrong); }),
                 "rank 1 failed: data_loader: workers");
  }
  auto loader = make_data_loader(CountingDataset(10), {.workers = odd ? 1 : 0});
  loader->set_epoch(odd ? 4 : 3);
  EXPECT_PRED2(contains, message_of<MismatchError>([&] { loader->begin(); }),
               "rank 1 has epoch 4 with 0 samples used");
  loader->set_epoch(3);
  EXPECT_EQ(epoch_of(*loader).size(), loader->batches_left());
}

}  // namespace
}  // namespace hvd::testing
