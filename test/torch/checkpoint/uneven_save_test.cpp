#include <csignal>

#include "hvd/torch/checkpointer.h"
#include "torch/checkpoint/checkpoint_job.h"

// Checkpoints while some ranks are in join().

namespace hvd::testing {
namespace {

TEST(UnevenSave, WhileRanksHaveJoinedItIsAnErrorThatNamesThem) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const SharedFolder folder;
  int epoch = 1;
  const TrainingState state = TrainingState().value("epoch", epoch).random();
  for (const int absent : {0, size() - 1}) {
    SCOPED_TRACE(absent);
    if (rank() != absent) {
      // The sum is complete when the other rank has joined.
      const auto sum = allreduce(torch::ones({}), {.name = "joined", .op = ReduceOp::kSum});
      EXPECT_EQ(sum.item<int>(), size() - 1);
      const std::string expected =
          "rank " + std::to_string(absent) + " has called join() and takes no part";
      EXPECT_PRED2(contains,
                   message_of<MismatchError>([&] { save_checkpoint(folder.path(), state); }),
                   expected);
      EXPECT_PRED2(contains,
                   message_of<MismatchError>([&] { load_checkpoint(folder.path(), state); }),
                   expected);
    }
    join(state);
    EXPECT_EQ(load_checkpoint(folder.path(), state), std::nullopt) << "a checkpoint was saved";
  }
  save_checkpoint(folder.path(), state);
  EXPECT_EQ(load_checkpoint(folder.path(), state), 0U);
}

// Some ranks call join() while the first is still writing.
TEST(UnevenSave, AJoinWaitsForBackgroundWrites) {
  const SharedFolder folder;
  torch::Tensor ballast = torch::ones({std::int64_t{1} << 20});
  int epoch = 0;
  const TrainingState state = TrainingState().value("ballast", ballast).value("epoch", epoch);
  for (int round = 0; round < 8; ++round) {
    Checkpointer checkpointer(folder.path(), state, {.keep = 1, .background = true});
    epoch = round;
    const std::uint64_t step = checkpointer.save();
    const int more = (rank() + round) % size();
    for (int i = 0; i < more; ++i) allreduce(torch::ones({}), {.name = "batch"});
    join(state);
    checkpointer.wait();
    EXPECT_EQ(checkpointer.load(), step);
    EXPECT_EQ(epoch, round);
  }
}

TEST(UnevenSave, SigtermWhileRanksHaveJoinedIsRememberedUntilAllTakePart) {
  const SharedFolder folder;
  int epoch = 5;
  Checkpointer checkpointer(folder.path(), TrainingState().value("epoch", epoch),
                            {.save_on_sigterm = true});
  if (rank() == 0) {
    std::raise(SIGTERM);
    if (size() > 1) {
      const auto sum = allreduce(torch::ones({}), {.name = "joined", .op = ReduceOp::kSum});
      EXPECT_EQ(sum.item<int>(), 1) << "some other rank has not joined";
      EXPECT_FALSE(checkpointer.should_stop(1));
    }
  }
  join();
  EXPECT_TRUE(checkpointer.should_stop(2));
  EXPECT_EQ(checkpointer.load(), 2U);
}

TEST(UnevenSave, JoinGivesEveryRankTheSharedRandomStreamsOfTheLast) {
  RandomStreams streams(11);
  TrainingState state;
  state.random(streams, "streams");
  const auto draw = [](at::Generator generator) { return torch::rand({4}, std::move(generator)); };
  const int last = size() - 1;
  draw(streams.own("noise"));
  for (int i = 0; i <= rank(); ++i) draw(streams.shared("order"));
  if (rank() != last) draw(streams.shared("unused on the last"));
  const torch::Tensor own = streams.own("noise").get_state().clone();
  torch::Tensor expected = streams.shared("order").get_state().clone();
  broadcast_(expected, last);
  // The last rank joins after the others.
  if (rank() == last) allreduce(torch::ones({}), {.name = "joined"});
  EXPECT_EQ(join(state), last);
  EXPECT_TRUE(streams.shared("order").get_state().equal(expected));
  EXPECT_TRUE(streams.own("noise").get_state().equal(own));
  EXPECT_TRUE(same_on_all_ranks({draw(streams.shared("order"))}));
  EXPECT_TRUE(same_on_all_ranks({draw(streams.shared("unused on the last"))}));
}

}  // namespace
}  // namespace hvd::testing
