// hvd::Accelerator and hvd::Trainer in elastic jobs under hvdrun (elastic_loops_program.cpp).
#include <filesystem>

#include "training_job.h"

namespace hvd::launcher::test::loops {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

/// A program's arguments, in a folder of their own.
class Loop {
 public:
  Loop(const char* kind, Words words) : kind_(kind), words_(std::move(words)) {}
  Words with_words(const Words& more = {}) const {
    return with({HVD_TEST_LOOPS_PROGRAM, kind_, folder()}, with(words_, more));
  }
  std::string folder() const { return folder_.path() / "out"; }

 private:
  const TemporaryFolder folder_;
  const std::string kind_;
  const Words words_;
};

/// A kind of loop and the words of its program.
struct Case {
  const char* kind;
  Words words;
  unsigned seed;
};

class ElasticLoops : public ::testing::TestWithParam<Case> {};

TEST_P(ElasticLoops, KillsChangeNoBitOfACommittedStep) {
  const auto& [kind, words, seed] = GetParam();
  const bool is_long = std::getenv("HVD_TEST_LONG") != nullptr;
  const int kills = is_long ? 20 : 4;
  const int epochs = is_long ? 15 : 3;
  const Words program = with(words, {"epochs=" + std::to_string(epochs)});
  const int steps = Loop(kind, words).with_words().back() == "accumulate=2" ? 3 : 6;
  const Words chosen = kills_of(seed, kills, steps * epochs);
  SCOPED_TRACE(::testing::PrintToString(chosen));
  const Loop disturbed(kind, program), undisturbed(kind, program);
  expect_same_commits(run_job(kFour, disturbed.with_words(chosen)),
                      run_job(kFour, undisturbed.with_words()), kills);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ElasticLoops,
    ::testing::Values(Case{"accelerator", {"fp16"}, 3}, Case{"accelerator", {"accumulate=2"}, 4},
                      Case{"accelerator", {"sharded"}, 7}, Case{"trainer", {}, 5},
                      Case{"trainer", {"fp16", "save=2", "accumulate=2"}, 6},
                      Case{"trainer", {"sharded", "save=2"}, 8}),
    [](const auto& info) { return std::string(info.param.kind) + std::to_string(info.index); });

class ElasticLoopSizes : public ::testing::TestWithParam<Case> {};

TEST_P(ElasticLoopSizes, EachSampleIsUsedOnceThroughFewerAndMoreRanks) {
  const auto& [kind, words, seed] = GetParam();
  const Words program = with(words, {"plain", "epochs=8"});
  const Loop loop(kind, program), lone(kind, with(program, {"batch=16"}));
  const Result disturbed = run_job({"-np", "4", "--min-np", "3"},
                                   loop.with_words({"sleep=500", "await=4", "kill=2,5,backward"}));
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << disturbed.out;
  EXPECT_EQ(printed.sizes.back(), 4) << disturbed.out;
  expect_each_sample_once(printed, 16, 8);
  EXPECT_THAT(printed.ends, SizeIs(1));
  const Result alone = run_job({"-np", "1", "--min-np", "1"}, lone.with_words());
  ASSERT_EQ(alone.code, 0) << alone.err;
  expect_close_losses(printed, read(alone.out));
}

/// With --long also a trainer with a sharded optimizer.
std::vector<Case> loop_sizes() {
  std::vector<Case> cases = {{"accelerator", {"global=16"}, 0},
                             {"trainer", {}, 0},
                             {"accelerator", {"global=16", "sharded"}, 0}};
  if (std::getenv("HVD_TEST_LONG") != nullptr) cases.push_back({"trainer", {"sharded"}, 0});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ElasticLoopSizes, ::testing::ValuesIn(loop_sizes()),
                         [](const auto& info) {
                           return std::string(info.param.kind) + std::to_string(info.index);
                         });

class ElasticLoopLoss : public ::testing::TestWithParam<Case> {};

TEST_P(ElasticLoopLoss, ALossOfAllRanksContinuesFromTheNewestCheckpoint) {
  const auto& [kind, words, seed] = GetParam();
  // With dropout: a checkpoint contains the position of the random streams.
  const Words program = with(words, {"epochs=3", "save=3"});
  const Loop disturbed(kind, program), undisturbed(kind, program);
  const Result lost = run_job(kFour, disturbed.with_words({"kill=all,7,forward"}));
  ASSERT_EQ(lost.code, 0) << lost.err << lost.out;
  EXPECT_EQ(count(lost.out, "ranks 6 4\n"), 4) << lost.out;
  const Result whole = run_job(kFour, undisturbed.with_words());
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(read(lost.out).losses, read(whole.out).losses);
  EXPECT_EQ(read(lost.out).ends, read(whole.out).ends);
  EXPECT_THAT(read(whole.out).losses, SizeIs(18));
}

INSTANTIATE_TEST_SUITE_P(Cases, ElasticLoopLoss,
                         ::testing::Values(Case{"accelerator", {}, 0}, Case{"trainer", {}, 0},
                                           Case{"accelerator", {"sharded"}, 0},
                                           Case{"trainer", {"sharded"}, 0}),
                         [](const auto& info) {
                           return std::string(info.param.kind) + std::to_string(info.index);
                         });

class ElasticLoopParts : public ::testing::TestWithParam<Case> {};

/// Three of four ranks, which keep each other's parts, are lost at once.
TEST_P(ElasticLoopParts, ALossOfAPartContinuesFromTheNewestCheckpoint) {
  const auto& [kind, words, seed] = GetParam();
  const Words program = with(words, {"sharded", "epochs=3", "save=3"});
  const Loop disturbed(kind, program), undisturbed(kind, program);
  const Result lost = run_job(
      kFour, disturbed.with_words({"kill=2,7,forward", "kill=3,7,forward", "kill=4,7,forward"}));
  ASSERT_EQ(lost.code, 0) << lost.err << lost.out;
  EXPECT_THAT(lost.err, HasSubstr("is lost: no rank has the part"));
  EXPECT_EQ(count(lost.out, "ranks 6 4\n"), 4) << lost.out;
  const Result whole = run_job(kFour, undisturbed.with_words());
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(read(lost.out).losses, read(whole.out).losses);
  EXPECT_EQ(read(lost.out).ends, read(whole.out).ends);
}

INSTANTIATE_TEST_SUITE_P(Cases, ElasticLoopParts,
                         ::testing::Values(Case{"accelerator", {}, 0}, Case{"trainer", {}, 0}),
                         [](const auto& info) { return std::string(info.param.kind); });

TEST(ElasticLoops, AnAcceleratorOfTheFunctionComparesAndBroadcasts) {
  const Loop loop("inner", {"kill=2,4,forward"});
  const Result job = run_job(kFour, loop.with_words());
  ASSERT_EQ(job.code, 0) << job.err << job.out;
  EXPECT_EQ(count(job.out, "ranks 4 4\n"), 4) << job.out;
  EXPECT_EQ(count(job.out, "expected the same options on every rank"), 8) << job.out;
  const Printed printed = read(job.out);
  EXPECT_THAT(printed.losses, SizeIs(8));
  for (const auto& [step, checksums] : printed.losses) EXPECT_THAT(checksums, SizeIs(1)) << step;
}

TEST(ElasticTrainer, ARepeatedStepKeepsItsCompleteCheckpoint) {
  const Loop loop("trainer", {"plain", "epochs=1", "save=3", "kill=2,2,save"});
  const Result job = run_job(kFour, loop.with_words());
  ASSERT_EQ(job.code, 0) << job.err << job.out;
  EXPECT_EQ(count(job.err, " was lost in generation "), 1) << job.err;
  const std::filesystem::path saved = loop.folder();
  EXPECT_TRUE(std::filesystem::exists(saved / "checkpoint-3/step-000000000003/common.g1"));
  EXPECT_TRUE(std::filesystem::exists(saved / "checkpoint-6/step-000000000006/common.g2"));
}

TEST(ElasticTrainer, ALossOfAllRanksBeforeTheFirstCheckpointResumesAgain) {
  const Loop loop("trainer", {"plain", "epochs=2"});
  const Result earlier = run_job(kFour, loop.with_words({"save=3"}));
  ASSERT_EQ(earlier.code, 0) << earlier.err;
  const Result lost =
      run_job(kFour, loop.with_words({"save=100", "from=9", "kill=all,10,forward"}));
  ASSERT_EQ(lost.code, 0) << lost.err << lost.out;
  EXPECT_EQ(count(lost.out, "ranks 9 4\n"), 8) << lost.out;
  EXPECT_EQ(read(lost.out).ends, read(earlier.out).ends);
}

TEST(ElasticTrainer, ALossOfAllRanksKeepsTheSamplesOfAStep) {
  const Words program = {"plain", "epochs=2", "save=3"};
  const Loop disturbed("trainer", program), undisturbed("trainer", program);
  const Result lost = run_job({"-np", "4", "--min-np", "1"},
                              disturbed.with_words({"kill=all,4,forward", "late=3000"}));
  ASSERT_EQ(lost.code, 0) << lost.err << lost.out;
  EXPECT_EQ(count(lost.out, "ranks 3 1\n"), 1) << lost.out;
  const Result whole = run_job(kFour, undisturbed.with_words());
  ASSERT_EQ(whole.code, 0) << whole.err;
  expect_close_losses(read(lost.out), read(whole.out));
}

TEST(ElasticTrainer, AProcessThatJoinsWithoutAShareOfABatchEnds) {
  const Loop loop("trainer", {"plain", "epochs=1", "batch=2", "sleep=150"});
  const Result job = run_job({"-np", "1", "--min-np", "1", "--max-np", "3"}, loop.with_words());
  ASSERT_EQ(job.code, 0) << job.err << job.out;
  EXPECT_THAT(job.err, HasSubstr("a batch has 2 samples on all ranks"));
  EXPECT_THAT(job.err, HasSubstr("start it with --max-np 2 at most"));
  EXPECT_THAT(read(job.out).losses, SizeIs(45)) << job.out;
}

TEST(ElasticTrainer, AJobDoesNotStartOverCheckpointsOfAnEarlierOne) {
  const Words two = {"-np", "2", "--min-np", "2"};
  const Loop loop("trainer", {"plain", "epochs=1", "save=3", "batch=8"});
  const Result first = run_job(two, loop.with_words());
  ASSERT_EQ(first.code, 0) << first.err;
  const Result second = run_job(two, loop.with_words());
  EXPECT_NE(second.code, 0);
  EXPECT_THAT(second.err, HasSubstr("has checkpoint-6 of an earlier job")) << second.out;
  const Result third = run_job(two, loop.with_words({"resume", "epochs=2"}));
  ASSERT_EQ(third.code, 0) << third.err;
  EXPECT_EQ(read(third.out).losses.begin()->first, 7);
  EXPECT_EQ(read(third.out).losses.rbegin()->first, 12);
}

}  // namespace
}  // namespace hvd::launcher::test::loops
