#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "support/fake_carrier.h"

// How many messages an allreduce takes: that of the whole tensor to each other rank, or a slice to
// its owner and the result from there. What comes out is the conformance suite's business.

namespace hvd::flat {
namespace {

class QuietPeers final : public Peers {
 public:
  QuietPeers(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void ring(int) noexcept override {}

 private:
  const int rank_;
  const int size_;
};

constexpr std::size_t kElements = 1024;

/// Sent by all ranks for one allreduce of 4 KiB.
int messages_of_allreduce(int size, const FlatTuning& tuning) {
  const auto network = testing::FakeNetwork::create(size);
  std::vector<std::unique_ptr<QuietPeers>> peers;
  std::vector<std::unique_ptr<Channel>> channels;
  std::vector<std::unique_ptr<Work>> works;
  std::vector<std::vector<float>> tensors(static_cast<std::size_t>(size),
                                          std::vector<float>(kElements, 1.0F));
  ChannelSpec spec;
  for (int rank = 0; rank < size; ++rank) spec.ranks.push_back(rank);
  for (int rank = 0; rank < size; ++rank) {
    peers.push_back(std::make_unique<QuietPeers>(rank, size));
    spec.set_rank = rank;
    channels.push_back(FlatBackend(network->carrier(rank), tuning).open(spec, *peers.back()));
    const auto bytes = std::as_writable_bytes(std::span(tensors[static_cast<std::size_t>(rank)]));
    works.push_back(channels.back()->launch(
        {.kind = OpKind::kAllreduce, .count = static_cast<std::int64_t>(kElements)}, bytes, bytes));
  }
  for (int pass = 0; pass < 100 && !works.empty(); ++pass)
    std::erase_if(works, [](const auto& work) { return work->progress(); });
  EXPECT_TRUE(works.empty()) << "they end";
  for (const auto& tensor : tensors) EXPECT_EQ(tensor.back(), static_cast<float>(size));
  return network->sent();
}

TEST(FlatMessages, TwoRanksSendWholeWhatAPairMay) {
  const FlatTuning slices = {.direct_bytes = 64};
  FlatTuning whole = slices;
  whole.direct_pair_bytes = kElements * sizeof(float);
  EXPECT_EQ(messages_of_allreduce(2, slices), 4);
  EXPECT_EQ(messages_of_allreduce(2, whole), 2);
  whole.direct_pair_bytes -= 1;
  EXPECT_EQ(messages_of_allreduce(2, whole), 4) << "a larger one";
}

TEST(FlatMessages, ThreeRanksDoNotByThatSetting) {
  const FlatTuning slices = {.direct_bytes = 64};
  FlatTuning whole = slices;
  whole.direct_pair_bytes = std::size_t{1} << 20;
  EXPECT_EQ(messages_of_allreduce(3, whole), messages_of_allreduce(3, slices));
}

}  // namespace
}  // namespace hvd::flat
