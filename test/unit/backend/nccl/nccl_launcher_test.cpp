// The thread that makes NCCL's calls.
#include "backend/nccl/launcher.h"

#include <thread>

#include "unit/backend/nccl/nccl_channel_test.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;

/// Uses the launcher in every run of the program.
class NcclLauncherTest : public NcclChannelTest {
 protected:
  NcclLauncherTest() { ::setenv("HVD_TEST_NCCL_LAUNCH", "thread", 1); }
  ~NcclLauncherTest() override {
    before_ ? ::setenv("HVD_TEST_NCCL_LAUNCH", before_->c_str(), 1)
            : ::unsetenv("HVD_TEST_NCCL_LAUNCH");
  }
  static std::optional<std::string> value_before() {
    const char* const value = std::getenv("HVD_TEST_NCCL_LAUNCH");
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  }
  /// The number of threads that NCCL starts in this many steps of an allreduce and an alltoall,
  /// which is a group of calls.
  int threads_in_steps(int steps) {
    const int before = nccl_->counts(0).threads;
    for (int step = 0; step < steps; ++step) {
      allreduce(sum(3), {{1, 2, 3}, {4, 5, 6}});
      exchange();
    }
    return nccl_->counts(0).threads - before;
  }
  void exchange() {
    static constexpr std::int64_t kOne[] = {1, 1};
    Collective alltoall;
    alltoall.kind = OpKind::kAlltoall;
    alltoall.counts = alltoall.send_counts = kOne;
    std::vector<std::unique_ptr<Work>> works;
    std::vector<std::span<std::byte>> received;
    for (int rank = 0; rank < 2; ++rank) {
      const float first = static_cast<float>(10 * rank);
      received.push_back(tensor({-1, -1}));
      works.push_back(ranks_[static_cast<std::size_t>(rank)]->channel->launch(
          alltoall, tensor({first, first + 1}), received.back()));
    }
    for (const auto& work : works) EXPECT_TRUE(soon([&] { return work->progress(); }));
    EXPECT_TRUE(gpu_.run_all());
    EXPECT_EQ(values_of(received[1]), (std::vector<float>{1, 11}));
  }

 private:
  const std::optional<std::string> before_ = value_before();
};

TEST_F(NcclLauncherTest, NcclStartsNoThreadInAStep) {
  start(2);
  ASSERT_TRUE(connect(2));
  EXPECT_EQ(threads_in_steps(10), 0);
  end_ranks();
  EXPECT_EQ(nccl_->counts(0).threads, 0) << "and none outside the steps";
}

TEST_F(NcclLauncherTest, WithoutItThereIsOneForEachLaunch) {
  ::setenv("HVD_TEST_NCCL_LAUNCH", "nonblocking", 1);
  start(2);
  ASSERT_TRUE(connect(2));
  EXPECT_EQ(threads_in_steps(10), 20);
}

/// The first of two ranks of a communicator that NCCL is creating.
class NcclLauncherInitTest : public NcclLauncherTest {
 protected:
  NcclLauncherInitTest() {
    start(1);
    launcher_ = library(0, ranks_[0]->device);
    comm_ = launcher_->begin_init(id_ = nccl_->library(0)->make_id(), 2, 0, nccl::Blocking::kNo);
    EXPECT_TRUE(soon([&] { return nccl_->counts(0).inits == 1; }));
    EXPECT_EQ(launcher_->health(comm_).state, nccl::CommState::kBusy);
  }
  ~NcclLauncherInitTest() override {
    launcher_.reset();
    end_left_threads();
  }

  std::shared_ptr<nccl::Library> launcher_;
  nccl::UniqueId id_;
  nccl::Comm comm_;
};

// The peer never joins, so NCCL does not return, and there is no communicator to abort.
TEST_F(NcclLauncherInitTest, ACommunicatorThatIsNeverCreatedDoesNotBlockTheEnd) {
  launcher_->abort({&comm_, 1});
  launcher_.reset();
  EXPECT_EQ(nccl_->counts(0).aborted, 0);
}

TEST_F(NcclLauncherInitTest, ACommunicatorCreatedAfterItsAbortIsAborted) {
  launcher_->abort({&comm_, 1});
  nccl_->library(1)->begin_init(id_, 2, 1, nccl::Blocking::kNo);
  EXPECT_TRUE(nccl_->wait_for_aborts(0, 1));
}

// Calls on other communicators follow the one under way, except those whose communicator is aborted
// meanwhile.
TEST_F(NcclLauncherInitTest, CallsAreMadeInTheOrderOfSubmission) {
  const nccl::Comm behind =
      launcher_->begin_init(nccl_->library(0)->make_id(), 1, 0, nccl::Blocking::kNo);
  const nccl::Comm dropped =
      launcher_->begin_init(nccl_->library(0)->make_id(), 1, 0, nccl::Blocking::kNo);
  launcher_->abort({&dropped, 1});
  EXPECT_EQ(nccl_->counts(0).inits, 1);
  EXPECT_EQ(launcher_->health(behind).state, nccl::CommState::kBusy);
  nccl_->library(1)->begin_init(id_, 2, 1, nccl::Blocking::kNo);
  ASSERT_TRUE(soon([&] { return launcher_->health(behind).state == nccl::CommState::kSettled; }));
  EXPECT_EQ(launcher_->health(comm_).state, nccl::CommState::kSettled);
  launcher_.reset();
  EXPECT_EQ(nccl_->counts(0).inits, 2);
}

/// A launch that hangs. The first version that can revoke a communicator is 22809.
class NcclLauncherHangTest : public NcclLauncherTest {
 protected:
  void abort_hanging_launch(int version) {
    start(2, {.version = version, .launch_hangs_at = 0, .return_takes = milliseconds(150)},
          {.teardown_timeout = seconds(5)});
    ASSERT_TRUE(connect(2));
    const auto memory = tensor({1, 2, 3});
    const auto work = ranks_[0]->channel->launch(sum(3), memory, memory);
    for (int i = 0; i < 20; ++i) {
      EXPECT_FALSE(work->progress()) << "progress() must not block";
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_NO_THROW(ranks_[0]->channel->check_health());
    ranks_[0]->channel->abort();
    EXPECT_TRUE(nccl_->wait_for_aborts(0, 1));
    ranks_[0]->channel->wait_for_abort();
    EXPECT_FALSE(ranks_[0]->device->api().given_up());
    EXPECT_EQ(nccl_->counts(0).launches, 0);
    end_ranks();
  }
};

// The fake reports a fault if the abort frees the communicator before the call has returned.
TEST_F(NcclLauncherHangTest, IsRevokedBeforeItsCommunicatorIsFreed) {
  abort_hanging_launch(22809);
  EXPECT_EQ(nccl_->counts(0).revoked, 1);
}

TEST_F(NcclLauncherHangTest, IsAbortedByVersionsThatCannotRevoke) {
  abort_hanging_launch(22808);
  EXPECT_EQ(nccl_->counts(0).revoked, 0);
}

TEST_F(NcclLauncherTest, AnAbortWithoutARunningCallRevokesNothing) {
  start(2);
  ASSERT_TRUE(connect(2));
  for (const auto& rank : ranks_) rank->channel->abort();
  EXPECT_TRUE(nccl_->wait_for_aborts(0, 1));
  EXPECT_EQ(nccl_->counts(0).revoked, 0);
}

TEST_F(NcclLauncherTest, AChannelThatEndsDuringALaunchWaitsForItsEnd) {
  start(2, {.launch_takes = milliseconds(50)});
  ASSERT_TRUE(connect(2));
  std::vector<std::unique_ptr<Work>> works;
  for (const auto& rank : ranks_) {
    const auto memory = tensor({1, 2, 3});
    works.push_back(rank->channel->launch(sum(3), memory, memory));
  }
  works.clear();
  end_ranks();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(nccl_->counts(rank).launches, 1);
    EXPECT_EQ(nccl_->counts(rank).finalized, 1);
    EXPECT_EQ(nccl_->counts(rank).destroyed, 1);
    EXPECT_EQ(nccl_->counts(rank).aborted, 0);
  }
}

TEST_F(NcclLauncherTest, HealthReportsAFailedCall) {
  start(1);
  ASSERT_TRUE(connect(1));
  const auto library = nccl_->library(0);
  const auto launcher = this->library(0, ranks_[0]->device);
  const device::OwnedStream stream(*ranks_[0]->device);
  const nccl::Comm comm = launcher->begin_init(library->make_id(), 1, 0, nccl::Blocking::kNo);
  ASSERT_TRUE(soon([&] { return launcher->health(comm).state == nccl::CommState::kSettled; }));
  const auto memory = tensor({1});
  // NCCL does not have the type. The thread continues afterwards.
  launcher->begin_group();
  launcher->launch(
      {nccl::Call::Kind::kBroadcast, memory.data(), memory.data(), 1, DataType::kInt16, {}, 0},
      comm, stream.get());
  launcher->end_group();
  ASSERT_TRUE(soon([&] { return launcher->health(comm).state == nccl::CommState::kFailed; }));
  EXPECT_NE(launcher->health(comm).text.find("no such type"), std::string::npos);
  const nccl::Comm other = launcher->begin_init(library->make_id(), 1, 0, nccl::Blocking::kNo);
  EXPECT_TRUE(soon([&] { return launcher->health(other).state == nccl::CommState::kSettled; }));
}

}  // namespace
}  // namespace hvd::testing
