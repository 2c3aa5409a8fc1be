// Training in elastic jobs on two "hosts" with a network of their own (test/support/two_hosts.h),
// whose hosts are killed and cut off (elastic_training_program.cpp). The losses are computed anew
// with LibTorch alone. Skipped, with the reason, where such hosts cannot be made.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "support/two_hosts.h"
#include "training_job.h"

namespace hvd::launcher::test {
namespace {

using std::chrono::milliseconds;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int kBatch = 10;         // samples of a step on all ranks
constexpr int kStepsPerEpoch = 9;  // of 90 samples

/// Returns the losses that follow from the samples that the job's ranks have used.
Printed recompute(const Printed& printed, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  {
    std::ofstream input(folder / "samples");
    for (const auto& [commit, samples] : printed.samples) {
      input << commit;
      for (const int sample : samples) input << ' ' << sample;
      input << '\n';
    }
  }
  Start start;
  start.program = "sh";
  start.arguments = {"-c", "exec " HVD_TEST_RECOMPUTE_PROGRAM " < \"$0\"", folder / "samples"};
  const Result result = HvdrunProcess(start).wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  return read(result.out);
}

class ElasticTrainingHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }

  /// hvdrun on host 0, and two workers on each host; the first ranks are on host `first`. A host
  /// that is silent for a third of the peer timeout is lost. Both hosts have one file system.
  std::unique_ptr<HvdrunProcess> job(int first, const char* peer_timeout, int epochs,
                                     const Words& pace = {"sleep=25"}) const {
    Start start;
    start.prefix = hosts_.prefix(0);
    start.arguments = {"--rsh",    HVD_TEST_AGENT,
                       "-np",      "4",
                       "--min-np", "2",
                       "--bind",   "none",
                       "-H",       hosts_.name(first) + ":2," + hosts_.name(1 - first) + ":2"};
    start.arguments = with(start.arguments, with(program(epochs), pace));
    start.environment = {{"HVD_PEER_TIMEOUT", peer_timeout}, {"OMP_NUM_THREADS", "1"}};
    auto hvdrun = std::make_unique<HvdrunProcess>(start);
    EXPECT_TRUE(hvdrun->wait_for("loss 12 ", 4, kTimeout));
    return hvdrun;
  }
  Words program(int epochs) const {
    return {HVD_TEST_TRAINING_PROGRAM,
            "plain",
            "loader",
            "global=" + std::to_string(kBatch),
            "epochs=" + std::to_string(epochs),
            "checkpointer=" + saved().string()};
  }
  std::filesystem::path saved() const { return folder_.path() / "saved"; }

  /// Expects that each sample of an epoch was used in one committed step, that the losses are
  /// those of a computation without hvd, and that the newest checkpoint is that of the end.
  Printed expect_end(HvdrunProcess& hvdrun, int epochs) {
    const Result result = hvdrun.wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.err << result.out;
    err_ = result.err;
    const Printed printed = read(result.out);
    expect_each_sample_once(printed, kBatch, epochs);
    expect_close_losses(printed, recompute(printed, folder_.path() / "anew"));
    EXPECT_THAT(printed.ends, SizeIs(1));
    // A job that continues from the checkpoint has nothing left to do.
    const Result again = run_job({"-np", "1", "--min-np", "1"}, program(epochs));
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_EQ(read(again.out).ends, printed.ends);
    EXPECT_THAT(read(again.out).losses, SizeIs(0));
    return printed;
  }

  const hvd::testing::TwoHosts hosts_;
  const TemporaryFolder folder_;
  std::string err_;
};

TEST_F(ElasticTrainingHosts, AHostThatIsKilledReturns) {
  const int epochs = 16;
  const auto hvdrun = job(0, "6", epochs, {"sleep=500", "await=4"});
  hosts_.kill(1);
  const Printed printed = expect_end(*hvdrun, epochs);
  EXPECT_THAT(printed.sizes, Contains(2));
  EXPECT_EQ(printed.sizes.back(), 4);
  EXPECT_THAT(err_, HasSubstr("host " + hosts_.name(1) + " is lost"));
}

/// Until its lease has expired, the former rank 0 may save in the folder of the others.
TEST_F(ElasticTrainingHosts, ARankZeroThatIsCutOffIsReplaced) {
  const int epochs = 24;
  const auto hvdrun = job(1, "6", epochs);
  ASSERT_TRUE(hosts_.cut(1));
  const Printed printed = expect_end(*hvdrun, epochs);
  EXPECT_THAT(printed.sizes, Contains(2));
  const std::string last = "step-000000000" + std::to_string(epochs * kStepsPerEpoch);
  EXPECT_TRUE(std::filesystem::exists(saved() / last / "manifest"));
}

TEST_F(ElasticTrainingHosts, ACutOfTwoSecondsCostsNoStep) {
  const int epochs = 10;
  const auto hvdrun = job(0, "15", epochs);
  ASSERT_TRUE(hosts_.cut(1));
  std::this_thread::sleep_for(milliseconds(2000));
  ASSERT_TRUE(hosts_.mend(1));
  const Printed printed = expect_end(*hvdrun, epochs);
  EXPECT_THAT(printed.sizes, SizeIs(4));
  EXPECT_THAT(err_, Not(HasSubstr("lost")));
}

/// Also for longer than its lease, so that its ranks are lost and return.
TEST_F(ElasticTrainingHosts, AFlappingHost) {
  const int epochs = 60;
  const auto hvdrun = job(1, "3", epochs);
  for (const int cut_ms : {200, 1500, 600, 1200, 300, 2500}) {
    ASSERT_TRUE(hosts_.cut(1));
    std::this_thread::sleep_for(milliseconds(cut_ms));
    ASSERT_TRUE(hosts_.mend(1));
    std::this_thread::sleep_for(milliseconds(700));
  }
  expect_end(*hvdrun, epochs);
}

}  // namespace
}  // namespace hvd::launcher::test
