#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "support/fake_carrier.h"
#include "support/fakes.h"

// The number of messages of an allreduce: one with the whole tensor to each other rank, or one with
// each slice to its owner and one with the result back. The conformance suite checks the results.

namespace hvd::flat {
namespace {

constexpr std::size_t kElements = 1024;

/// The messages that all ranks send for one allreduce of 4 KiB.
int messages_of_allreduce(int size, const FlatTuning& tuning) {
  const auto network = testing::FakeNetwork::create(size);
  std::vector<std::unique_ptr<testing::FakePeers>> peers;
  std::vector<std::unique_ptr<Channel>> channels;
  std::vector<std::unique_ptr<Work>> works;
  std::vector<std::vector<float>> tensors(static_cast<std::size_t>(size),
                                          std::vector<float>(kElements, 1.0F));
  ChannelSpec spec;
  for (int rank = 0; rank < size; ++rank) spec.ranks.push_back(rank);
  for (int rank = 0; rank < size; ++rank) {
    peers.push_back(std::make_unique<testing::FakePeers>(rank, size));
    spec.set_rank = rank;
    channels.push_back(FlatBackend(network->carrier(rank), tuning).open(spec, *peers.back()));
    const auto bytes = std::as_writable_bytes(std::span(tensors[static_cast<std::size_t>(rank)]));
    works.push_back(channels.back()->launch(
        {.kind = OpKind::kAllreduce, .count = static_cast<std::int64_t>(kElements)}, bytes, bytes));
  }
  for (int pass = 0; pass < 100 && !works.empty(); ++pass)
    std::erase_if(works, [](const auto& work) { return work->progress(); });
  EXPECT_TRUE(works.empty()) << "all works complete";
  for (const auto& tensor : tensors) EXPECT_EQ(tensor.back(), static_cast<float>(size));
  return network->sent();
}

TEST(FlatMessages, TwoRanksSendTensorsUpToTheLimitOfPairsWhole) {
  const FlatTuning slices = {.direct_bytes = 64};
  FlatTuning whole = slices;
  whole.direct_pair_bytes = kElements * sizeof(float);
  EXPECT_EQ(messages_of_allreduce(2, slices), 4);
  EXPECT_EQ(messages_of_allreduce(2, whole), 2);
  whole.direct_pair_bytes -= 1;
  EXPECT_EQ(messages_of_allreduce(2, whole), 4) << "a higher limit";
}

TEST(FlatMessages, SlicesAreAtMostAsLargeAsTheLimit) {
  FlatTuning tuning = {.slice_bytes = kElements * sizeof(float) / 2, .direct_bytes = 64};
  EXPECT_EQ(messages_of_allreduce(2, tuning), 4) << "one slice for each rank, and the results";
  tuning.slice_bytes /= 2;
  EXPECT_EQ(messages_of_allreduce(2, tuning), 8);
}

TEST(FlatMessages, ThreeRanksIgnoreTheLimitOfPairs) {
  const FlatTuning slices = {.direct_bytes = 64};
  FlatTuning whole = slices;
  whole.direct_pair_bytes = std::size_t{1} << 20;
  EXPECT_EQ(messages_of_allreduce(3, whole), messages_of_allreduce(3, slices));
}

}  // namespace
}  // namespace hvd::flat
