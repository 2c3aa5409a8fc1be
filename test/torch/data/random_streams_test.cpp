#include <ATen/CPUGeneratorImpl.h>

#include <sstream>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

torch::Tensor draw(at::Generator generator) { return torch::rand({4}, std::move(generator)); }

std::string archived(const RandomStreams& streams) {
  torch::serialize::OutputArchive archive;
  streams.save(archive);
  std::stringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void load(RandomStreams& streams, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  streams.load(archive);
}

TEST(RandomStreams, DifferByRankNameAndSeedUnlessTheyAreShared) {
  RandomStreams streams(5), equal(5), other(6);
  const torch::Tensor noise = draw(streams.own("noise"));
  EXPECT_TRUE(draw(equal.own("noise")).equal(noise));
  EXPECT_FALSE(draw(equal.own("noise")).equal(noise));  // continues
  EXPECT_FALSE(draw(other.own("noise")).equal(noise));
  EXPECT_FALSE(draw(streams.own("mask")).equal(noise));
  const torch::Tensor shared = draw(streams.shared("noise"));
  EXPECT_FALSE(shared.equal(noise));
  EXPECT_TRUE(same_on_all_ranks(shared));
  const auto all = allgather_object(noise);
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) EXPECT_FALSE(all[a].equal(all[b]));
  }
}

TEST(RandomStreams, SeedLibTorchsOwnDifferentlyOnEachRank) {
  RandomStreams(5).seed_default();
  const torch::Tensor first = torch::rand({4});
  RandomStreams(6).seed_default();
  EXPECT_FALSE(torch::rand({4}).equal(first));
  RandomStreams(5).seed_default();
  EXPECT_TRUE(torch::rand({4}).equal(first));
  const auto all = allgather_object(first);
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) EXPECT_FALSE(all[a].equal(all[b]));
  }
}

TEST(RandomStreams, GoOnWhereTheyWereSaved) {
  RandomStreams streams(5);
  const at::Generator kept = streams.own("noise");
  draw(kept);
  torch::randn({3}, streams.shared("order"));  // leaves half a pair of normal numbers
  const std::string saved = archived(streams);
  const torch::Tensor noise = draw(kept), order = torch::randn({3}, streams.shared("order"));
  const torch::Tensor late = draw(streams.own("late"));

  RandomStreams resumed(5);
  load(resumed, saved);
  EXPECT_TRUE(draw(resumed.own("noise")).equal(noise));
  EXPECT_TRUE(torch::randn({3}, resumed.shared("order")).equal(order));
  EXPECT_TRUE(draw(resumed.own("late")).equal(late));
  load(streams, saved);  // also the generators that were returned before
  EXPECT_TRUE(draw(kept).equal(noise));
  EXPECT_TRUE(draw(streams.own("late")).equal(late));
}

TEST(RandomStreams, RefuseAForeignState) {
  RandomStreams streams(5);
  draw(streams.own("noise"));
  const std::string saved = archived(streams);
  RandomStreams other(6);
  EXPECT_PRED2(contains, message_of<UsageError>([&] { load(other, saved); }),
               "expected streams of seed 6, got those of seed 5");
  std::stringstream nothing;
  torch::save(torch::ones(3), nothing);
  EXPECT_PRED2(contains, message_of<UsageError>([&] { load(streams, nothing.str()); }),
               "no random streams");
  torch::serialize::OutputArchive damaged;
  damaged.write("hvd_random_streams", torch::zeros({5}, torch::kUInt8), true);
  std::stringstream bytes;
  damaged.save_to(bytes);
  const torch::Tensor next = draw(RandomStreams(streams).own("noise").clone());
  EXPECT_THROW(load(streams, bytes.str()), Error);
  EXPECT_TRUE(draw(streams.own("noise")).equal(next));
  if (size() == 1) return;
  const ProcessSet first = add_process_set({0});
  if (rank() != 0) {
    EXPECT_PRED2(contains, message_of<UsageError>([&] { RandomStreams(5, first); }),
                 "not in process set");
  }
  remove_process_set(first);
}

TEST(RandomStreams, ANewRankHasItsOwnAndTheSharedStreams) {
  libtorch::StreamTable saved(5, 0);
  draw(saved.stream("noise", false));
  draw(saved.stream("order", true));
  const std::string bytes = saved.encode();
  libtorch::StreamTable fresh(5, 3), fourth(5, 3), fifth(5, 4);
  fourth.decode(bytes, true)();
  fifth.decode(bytes, true)();
  const torch::Tensor noise = draw(fourth.stream("noise", false));
  EXPECT_FALSE(noise.equal(draw(saved.stream("noise", false))));
  EXPECT_FALSE(noise.equal(draw(fifth.stream("noise", false))));
  EXPECT_FALSE(noise.equal(draw(fresh.stream("noise", false))));  // not its first numbers
  EXPECT_TRUE(draw(fourth.stream("order", true)).equal(draw(saved.stream("order", true))));
  libtorch::StreamTable again(5, 3);
  again.decode(bytes, true)();
  EXPECT_TRUE(noise.equal(draw(again.stream("noise", false))));
}

TEST(RandomStreams, ACheckpointHoldsThoseOfEachRank) {
  const SharedFolder folder;
  RandomStreams streams(5);
  draw(streams.own("noise"));
  TrainingState state;
  state.random(streams);
  save_checkpoint(folder.path(), state);
  const torch::Tensor next = draw(streams.own("noise"));
  RandomStreams resumed(5);
  TrainingState other;
  other.random(resumed);
  EXPECT_TRUE(load_checkpoint(folder.path(), other).has_value());
  EXPECT_TRUE(draw(resumed.own("noise")).equal(next));
  RandomStreams wrong(7);
  TrainingState mistaken;
  mistaken.random(wrong);
  EXPECT_PRED2(contains,
               message_of<CheckpointError>([&] { load_checkpoint(folder.path(), mistaken); }),
               "seed 7");
}

}  // namespace
}  // namespace hvd::testing
