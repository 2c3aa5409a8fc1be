#include <algorithm>
#include <numeric>
#include <sstream>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using Indices = std::vector<std::size_t>;

Indices drain(DistributedSampler& sampler, std::size_t batch = 3) {
  Indices all;
  while (const auto indices = sampler.next(batch)) {
    EXPECT_LE(indices->size(), batch);
    all.insert(all.end(), indices->begin(), indices->end());
  }
  return all;
}

/// The shares of all ranks, interleaved.
Indices dealt(const Indices& own) {
  const std::vector<Indices> all = allgather_object(own);
  Indices order;
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (const Indices& share : all) {
      EXPECT_EQ(share.size(), own.size());
      if (i < share.size()) order.push_back(share[i]);
    }
  }
  return order;
}

TEST(Sampler, DealsEveryIndexPadsFromTheStartOrDropsTheTail) {
  const auto ranks = static_cast<std::size_t>(size());
  for (const std::size_t n : {0U, 1U, 2U, 3U, 7U, 10U, 11U, 64U}) {
    for (const bool drop : {false, true}) {
      SCOPED_TRACE(std::to_string(n) + (drop ? " drop" : " pad"));
      DistributedSampler sampler(n, {.shuffle = false, .drop_last = drop});
      const std::size_t share = drop ? n / ranks : (n + ranks - 1) / ranks;
      EXPECT_EQ(sampler.size(), share);
      const Indices order = dealt(drain(sampler));
      EXPECT_EQ(order.size(), share * ranks);
      for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % n);
    }
  }
}

TEST(Sampler, ShufflesAsPyTorchDoes) {
  // torch.randperm(10) with torch.Generator().manual_seed(seed + epoch), in PyTorch itself.
  const Indices seed0{4, 1, 7, 5, 3, 9, 0, 8, 6, 2};
  const Indices seed5{1, 4, 9, 6, 3, 5, 0, 2, 8, 7};
  DistributedSampler sampler(10);
  Indices order = dealt(drain(sampler));
  order.resize(10);
  EXPECT_EQ(order, seed0);
  DistributedSampler later(10, {.seed = 2});
  later.set_epoch(3);
  order = dealt(drain(later));
  order.resize(10);
  EXPECT_EQ(order, seed5);
}

TEST(Sampler, EpochsDifferAndRepeat) {
  DistributedSampler sampler(101);
  const Indices first = drain(sampler);
  EXPECT_EQ(sampler.index(), sampler.size());
  sampler.reset();
  EXPECT_EQ(drain(sampler), first);
  sampler.set_epoch(1);
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 1U);
  EXPECT_NE(drain(sampler), first);
  sampler.set_epoch(0);
  sampler.reset();
  EXPECT_EQ(drain(sampler), first);
  sampler.reset(7);
  EXPECT_EQ(drain(sampler).size(), static_cast<std::size_t>((7 + size() - 1) / size()));
}

TEST(Sampler, AnEpochSetAfterResetCountsIfNothingWasDrawn) {
  DistributedSampler a(50), b(50);
  a.set_epoch(4);
  a.reset();
  b.reset();
  b.set_epoch(4);
  EXPECT_EQ(drain(a), drain(b));
}

TEST(Sampler, CopiesShareOneStateAlsoInsideADataLoader) {
  const auto dataset = torch::data::datasets::TensorDataset(torch::arange(24));
  DistributedSampler sampler(24);
  auto loader = torch::data::make_data_loader(dataset, sampler,
                                              torch::data::DataLoaderOptions().batch_size(4));
  const auto epoch = [&](std::size_t number) {
    sampler.set_epoch(number);
    Indices seen;
    for (auto& batch : *loader) {
      for (auto& example : batch)
        seen.push_back(static_cast<std::size_t>(example.data.item<std::int64_t>()));
    }
    return seen;
  };
  const Indices first = epoch(0);
  const Indices second = epoch(1);
  EXPECT_NE(first, second);
  EXPECT_EQ(epoch(0), first);
  Indices all = dealt(second);
  std::sort(all.begin(), all.end());
  Indices expected(24);
  std::iota(expected.begin(), expected.end(), 0U);
  EXPECT_EQ(all, expected);
}

TEST(Sampler, SharesTheDataSetAmongTheMembersOfAProcessSet) {
  for_each_set([](const ProcessSet& set) {
    DistributedSampler sampler(10, {.shuffle = false, .process_set = set});
    const auto drawn = sampler.next(100);
    ASSERT_TRUE(drawn.has_value());
    EXPECT_EQ(drawn->front(), static_cast<std::size_t>(set.rank()));
    EXPECT_EQ(drawn->size(), static_cast<std::size_t>((10 + set.size() - 1) / set.size()));
  });
  if (size() == 1) return;
  const ProcessSet first = add_process_set({0});
  if (rank() != 0) {
    EXPECT_THROW(DistributedSampler(10, {.process_set = first}), UsageError);
  }
  remove_process_set(first);
}

std::string saved(const DistributedSampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

void load(DistributedSampler& sampler, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  sampler.check(archive);
  sampler.load(archive);
}

TEST(Sampler, SavesItsEpochAndPosition) {
  DistributedSampler sampler(61);
  sampler.set_epoch(2);
  sampler.next(5);
  const std::string bytes = saved(sampler);
  const std::size_t share = sampler.size();
  const Indices rest = drain(sampler);

  DistributedSampler resumed(61);
  load(resumed, bytes);
  EXPECT_EQ(resumed.epoch(), 2U);
  EXPECT_EQ(resumed.index(), 5U);
  EXPECT_EQ(resumed.size(), share);
  EXPECT_EQ(drain(resumed), rest);
}

TEST(Sampler, RefusesTheStateOfAnother) {
  const std::string bytes = saved(DistributedSampler(60, {.seed = 1}));
  DistributedSampler larger(61, {.seed = 1}), unshuffled(60, {.shuffle = false, .seed = 1}),
      seeded(60, {.seed = 2});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { load(larger, bytes); }),
                       "a data set of samples: 61, got one of 60"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { load(unshuffled, bytes); }), "shuffle = 0"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { load(seeded, bytes); }), "seed = 2, got one"));
}

TEST(Sampler, ALoaderGoesOnWhereTheSavedOneWas) {
  DistributedSampler sampler(40);
  sampler.set_epoch(3);
  sampler.next(2);
  const std::string bytes = saved(sampler);
  const Indices rest = drain(sampler);
  sampler.reset();
  const Indices whole = drain(sampler);

  DistributedSampler resumed(40);
  load(resumed, bytes);
  resumed.set_epoch(3);
  resumed.reset();
  EXPECT_EQ(drain(resumed), rest);
  resumed.reset();
  EXPECT_EQ(drain(resumed), whole) << "only once";
  load(resumed, bytes);
  resumed.set_epoch(4);
  resumed.reset();
  EXPECT_EQ(drain(resumed).size(), whole.size()) << "another epoch starts from its beginning";
  load(resumed, saved(sampler));
  EXPECT_EQ(resumed.next(1), std::nullopt) << "saved at the end";
  resumed.reset();
  EXPECT_EQ(drain(resumed), whole);
  load(resumed, bytes);
  resumed.reset(7);
  EXPECT_EQ(drain(resumed).size(), static_cast<std::size_t>((7 + size() - 1) / size()));
}

// Each sample is used once, at any number of ranks.
TEST(Sampler, GoesOnAtAnotherNumberOfRanks) {
  const ProcessSet first = add_process_set({0});
  constexpr std::size_t kSamples = 64;
  Indices used;
  std::string bytes;
  if (rank() == 0) {  // alone
    DistributedSampler alone(kSamples, {.process_set = first});
    alone.set_epoch(1);
    used = *alone.next(24);
    bytes = saved(alone);
  }
  bytes = broadcast_object(bytes);
  used = broadcast_object(used);
  DistributedSampler together(kSamples);
  load(together, bytes);
  EXPECT_EQ(together.index(), 24U / static_cast<std::size_t>(size()));
  const Indices middle = dealt(*together.next(4));
  used.insert(used.end(), middle.begin(), middle.end());
  bytes = saved(together);
  if (rank() == 0) {  // and alone again
    DistributedSampler alone(kSamples, {.process_set = first});
    load(alone, bytes);
    const Indices rest = drain(alone);
    used.insert(used.end(), rest.begin(), rest.end());
    DistributedSampler whole(kSamples, {.process_set = first});
    whole.set_epoch(1);
    EXPECT_EQ(used, drain(whole));
  }
  remove_process_set(first);
}

}  // namespace
}  // namespace hvd::testing
