// Training in elastic jobs under hvdrun (elastic_training_program.cpp): ranks are killed, and the
// committed steps are compared with those of a run without kills.
#include <chrono>
#include <filesystem>

#include "training_job.h"

namespace hvd::launcher::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;

Words training(const Words& words) { return with({HVD_TEST_TRAINING_PROGRAM}, words); }

/// Runs the program with kills and without, and compares the commits. With --long there are 20
/// kills.
void expect_kills_change_nothing(Words program, unsigned seed) {
  const bool is_long = std::getenv("HVD_TEST_LONG") != nullptr;
  const int kills = is_long ? 20 : 4;
  const int epochs = is_long ? 15 : 3;
  program.push_back("batch=4");
  program.push_back("epochs=" + std::to_string(epochs));
  const Words chosen = kills_of(seed, kills, 6 * epochs);
  SCOPED_TRACE(::testing::PrintToString(chosen));
  expect_same_commits(run_job(kFour, training(with(program, chosen))),
                      run_job(kFour, training(program)), kills);
}

TEST(ElasticTraining, KillsChangeNoBitOfACommittedStepWithCopies) {
  expect_kills_change_nothing({"copy", "barrier"}, 1);
}

TEST(ElasticTraining, KillsChangeNoBitOfACommittedStepWithoutCopies) {
  expect_kills_change_nothing({"adam", "loader"}, 2);
}

TEST(ElasticTraining, WithoutCopiesAStepThatAllRanksHaveWrittenStays) {
  const Result result =
      run_job(kFour, training({"barrier", "batch=4", "epochs=2", "kill=3,4,written"}));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the samples of one step are used twice"));
  const Printed printed = read(result.out);
  EXPECT_THAT(printed.losses, SizeIs(12));
  for (const auto& [commit, values] : printed.losses) EXPECT_THAT(values, SizeIs(1)) << commit;
  EXPECT_THAT(printed.ends, SizeIs(1));
}

/// After a loss of all ranks the random streams continue, because a checkpoint has their position.
TEST(ElasticTraining, ACheckpointerThatOutlivesGenerationsSavesAndLoads) {
  const TemporaryFolder folder;
  const auto saved_in = [&](const std::string& name) {
    return "checkpointer=" + (folder.path() / name).string();
  };
  const Words program = {"adam", "loader", "batch=4", "epochs=4"};
  const Words kills = {"kill=2,3,backward", "kill=all,13,forward", "kill=7,18,commit",
                       "kill=8,21,step"};
  expect_same_commits(run_job(kFour, training(with(program, with({saved_in("disturbed")}, kills)))),
                      run_job(kFour, training(with(program, {saved_in("undisturbed")}))), 7);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "disturbed/step-000000000024/manifest"));
}

TEST(ElasticTraining, ACheckpointerSavesThroughFewerAndMoreRanks) {
  const TemporaryFolder folder;
  const Words program = {"plain", "global=10", "epochs=8", "loader"};
  const Result disturbed =
      run_job({"-np", "4", "--min-np", "3"},
              training(with(program, {"sleep=500", "await=4", "kill=2,5,backward",
                                      "checkpointer=" + (folder.path() / "saved").string()})));
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_EQ(printed.sizes.back(), 4) << disturbed.out;
  expect_each_sample_once(printed, 10, 8);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "saved/step-000000000072/manifest"));
}

TEST(ElasticTraining, AnExceptionThatRecursEndsTheJob) {
  const TemporaryFolder folder;
  const Result result =
      run_job({"-np", "2", "--min-np", "1", "--failure-limit", "3"},
              training({"batch=4", "throw=4", "loader", "checkpointer=" + folder.path().string()}));
  EXPECT_EQ(result.code, 76) << result.err;
  EXPECT_THAT(result.err, HasSubstr("an exception 3 times in a row at the same or an earlier "));
  EXPECT_THAT(result.err, HasSubstr(": the loss is not finite"));
}

/// The folder has checkpoints of an earlier run, one of the step at which the job is stopped.
TEST(ElasticTraining, AJobThatIsStoppedReplacesTheCheckpointOfAnEarlierRun) {
  const TemporaryFolder folder;
  const Words two = {"-np", "2", "--min-np", "2"};
  const Words program = {"batch=4", "loader", "epochs=1", "checkpointer=" + folder.path().string()};
  const Result earlier = run_job(two, training(program));
  ASSERT_EQ(earlier.code, 0) << earlier.err;
  const auto manifest = folder.path() / "step-000000000012/manifest";
  ASSERT_TRUE(std::filesystem::exists(manifest));
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  std::filesystem::last_write_time(manifest, long_ago);
  const Result stopped = run_job(two, training(with(program, {"from=10", "stop=12"})));
  ASSERT_EQ(stopped.code, 0) << stopped.err;
  ASSERT_THAT(read(stopped.out).losses, SizeIs(2)) << stopped.out;
  ASSERT_TRUE(std::filesystem::exists(manifest));
  EXPECT_GT(std::filesystem::last_write_time(manifest), long_ago + std::chrono::minutes(1));
}

class GlobalBatch : public ::testing::TestWithParam<const char*> {};

TEST_P(GlobalBatch, EachSampleIsUsedOnceThroughFewerAndMoreRanks) {
  Words program = {"plain", "global=10", "epochs=8"};
  if (GetParam() != std::string("sampler")) program.emplace_back(GetParam());
  const Result disturbed =
      run_job({"-np", "4", "--min-np", "3"},
              training(with(program, {"sleep=500", "await=4", "kill=2,5,backward"})));
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << disturbed.out;
  EXPECT_EQ(printed.sizes.back(), 4) << disturbed.out;
  expect_each_sample_once(printed, 10, 8);
  EXPECT_THAT(printed.ends, SizeIs(1));
  const Result alone = run_job({"-np", "1", "--min-np", "1"}, training(program));
  ASSERT_EQ(alone.code, 0) << alone.err;
  expect_close_losses(printed, read(alone.out));
}

TEST(ElasticTraining, FourThreeFourAndSixRanksUseEachSampleOnce) {
  const TemporaryFolder folder;
  const Words program = {"plain", "global=10", "epochs=16"};
  const Result disturbed =
      run_job({"-np", "4", "--min-np", "3", "--max-np", "6"},
              training(with(program, {"sleep=500", "await=6", "kill=2,5,backward",
                                      "grow=" + (folder.path() / "grow").string()})));
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << disturbed.out;
  EXPECT_THAT(printed.sizes, Contains(6)) << disturbed.out;
  EXPECT_EQ(printed.sizes.front(), 4);
  expect_each_sample_once(printed, 10, 16);
  EXPECT_THAT(printed.ends, SizeIs(1));
  const Result alone = run_job({"-np", "1", "--min-np", "1"}, training(program));
  ASSERT_EQ(alone.code, 0) << alone.err;
  expect_close_losses(printed, read(alone.out));
}

INSTANTIATE_TEST_SUITE_P(Sources, GlobalBatch, ::testing::Values("sampler", "loader"));

}  // namespace
}  // namespace hvd::launcher::test
