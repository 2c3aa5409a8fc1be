// The errors of ranks that disagree, stall, die or receive invalid messages. Single thread, virtual
// time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"
#include "transport/control_plane.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class FailureTest : public ::testing::Test {
 protected:
  void start(int size, std::shared_ptr<Backend> backend = {}, std::vector<std::string> hosts = {}) {
    LocalJobOptions options;
    options.rings_across_hosts = hosts.empty();
    options.hosts = std::move(hosts);
    options.backend = std::move(backend);
    options.size = size;
    options.runtime.background_thread = false;
    options.runtime.peer_timeout = seconds(3);
    options.runtime.stall_warning = seconds(5);
    options.runtime.stall_shutdown = seconds(10);
    options.longest_delay = milliseconds(1);
    job_ = std::make_unique<LocalJob>(options, clock_);
    data_.resize(static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank)
      data_[static_cast<std::size_t>(rank)].assign(8, static_cast<float>(rank + 1));
  }
  std::vector<float>& data(int rank) { return data_[static_cast<std::size_t>(rank)]; }
  Operation allreduce(int rank, const std::string& name) {
    return submit_one(job_->rank(rank), float_operation(data(rank), name));
  }
  bool run(const std::vector<Operation>& operations, Duration timeout = seconds(60)) {
    return job_->run_until(clock_, timeout, [&] {
      return std::all_of(operations.begin(), operations.end(),
                         [](const Operation& o) { return o.done(); });
    });
  }

  VirtualClock clock_;
  std::unique_ptr<LocalJob> job_;
  std::vector<std::vector<float>> data_;
};

TEST_F(FailureTest, ADisagreementIsAnErrorOnEveryRankAndTheNextOperationWorks) {
  start(3);
  data(2).resize(4);
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) operations.push_back(allreduce(rank, "w"));
  ASSERT_TRUE(run(operations, seconds(1)));
  for (const auto& operation : operations) {
    EXPECT_EQ(operation.status().code, StatusCode::kMismatch);
    EXPECT_EQ(operation.status().message,
              "allreduce 'w': shape differs: rank 0 [8], rank 2 [4]; every rank must submit the "
              "same shape");
    EXPECT_THROW(operation.status().raise_if_error(), MismatchError);
  }
  data(2).assign(8, 3.0F);
  operations.clear();
  for (int rank = 0; rank < 3; ++rank) operations.push_back(allreduce(rank, "w"));
  ASSERT_TRUE(run(operations, seconds(1)));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(data(rank), std::vector<float>(8, 6.0F));
}

TEST_F(FailureTest, ADisagreementAboutACachedTensorIsFoundToo) {
  start(2);
  for (int use = 0; use < 3; ++use) {
    ASSERT_TRUE(run({allreduce(0, "w"), allreduce(1, "w")}));
  }
  EXPECT_GT(job_->rank(1).metrics().cached_operations, 0U);
  data(1).resize(5);
  const std::vector<Operation> operations{allreduce(0, "w"), allreduce(1, "w")};
  ASSERT_TRUE(run(operations));
  EXPECT_EQ(operations[0].status().code, StatusCode::kMismatch);
  EXPECT_EQ(operations[1].status().code, StatusCode::kMismatch);
}

TEST_F(FailureTest, TheEndOfAStallIsLoggedAfterItsWarning) {
  start(2);
  ::testing::internal::CaptureStderr();
  const Operation early = allreduce(0, "w");
  EXPECT_FALSE(run({early}, seconds(6)));
  ASSERT_TRUE(run({early, allreduce(1, "w")}, seconds(1)));
  job_->run_until(clock_, seconds(1), [] { return false; });
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      AllOf(HasSubstr("allreduce 'w'"), HasSubstr("has waited"), HasSubstr("goes on after 6.")));
}

TEST_F(FailureTest, AStallEndsTheWaitersAndTheLateRanksNextUseOnly) {
  start(3);
  const std::vector<Operation> waiting{allreduce(0, "w"), allreduce(2, "w")};
  ASSERT_TRUE(run(waiting));
  for (const auto& operation : waiting) {
    EXPECT_THROW(operation.status().raise_if_error(), StalledError);
    EXPECT_THAT(operation.status().message,
                AllOf(HasSubstr("allreduce 'w'"), HasSubstr("rank 1 (localhost)")));
  }
  EXPECT_EQ(job_->rank(0).metrics().stalls, 1U);
  const Operation late = allreduce(1, "w");
  ASSERT_TRUE(run({late}, milliseconds(10)));
  EXPECT_EQ(late.status().code, StatusCode::kStalled);
  const std::vector<Operation> next{allreduce(0, "w"), allreduce(1, "w"), allreduce(2, "w")};
  ASSERT_TRUE(run(next));
  for (const auto& operation : next)
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

TEST_F(FailureTest, TheSameNameTwiceInFlightIsAUsageErrorAndTheFirstUseGoesOn) {
  start(2);
  const Operation first = allreduce(0, "w");
  EXPECT_THROW(allreduce(0, "w"), UsageError);
  const Operation other = allreduce(1, "w");
  ASSERT_TRUE(run({first, other}));
  EXPECT_TRUE(first.status().ok());
  EXPECT_EQ(data(0)[0], 3.0F);
}

TEST_F(FailureTest, AGroupWithANameInUseIsRefusedAsAWhole) {
  start(2);
  const Operation first = allreduce(0, "b");
  std::vector<Submission> group;
  std::vector<float> more(4, 1.0F);
  group.push_back(float_operation(more, "a"));
  group.push_back(float_operation(more, "b"));
  EXPECT_THROW(job_->rank(0).submit(std::move(group), Progress::kBackground), UsageError);
  ASSERT_TRUE(run({allreduce(0, "a"), allreduce(1, "a"), first, allreduce(1, "b")}))
      << "'a' must be free again";
}

TEST_F(FailureTest, ADeadPeerIsNamedOnEverySurvivor) {
  start(3);
  ASSERT_TRUE(run({allreduce(0, "w"), allreduce(1, "w"), allreduce(2, "w")}));
  const std::vector<Operation> operations{allreduce(0, "x"), allreduce(1, "x")};
  job_->kill(2);
  ASSERT_TRUE(run(operations, seconds(1)));
  for (const auto& operation : operations) {
    EXPECT_EQ(operation.status().code, StatusCode::kPeerLost);
    EXPECT_EQ(operation.status().rank, 2);
    EXPECT_THAT(operation.status().message,
                AllOf(HasSubstr("rank 2 (host localhost)"), HasSubstr("allreduce 'x'")));
  }
  EXPECT_TRUE(job_->rank(0).failed());
  EXPECT_THROW(allreduce(0, "y"), PeerLostError);
}

TEST_F(FailureTest, ADeadCoordinatorIsNoticedByEveryRank) {
  start(3);
  const std::vector<Operation> operations{allreduce(1, "x"), allreduce(2, "x")};
  job_->kill(0);
  ASSERT_TRUE(run(operations, seconds(1)));
  for (const auto& operation : operations) EXPECT_EQ(operation.status().rank, 0);
}

/// Has no channels: there is no memory left for one, or no more message tags.
class ClosedBackend final : public Backend {
 public:
  explicit ClosedBackend(int score) : score_(score) {}
  std::string_view name() const noexcept override { return "closed"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override {
    return score_;
  }
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override {
    throw Error("no channel can be opened");
  }

 private:
  const int score_;
};

TEST_F(FailureTest, ABatchThatCannotStartEndsAllOperationsWithTheCause) {
  for (const int score : {0, 1}) {
    start(2, std::make_shared<ClosedBackend>(score));
    std::vector<Operation> operations;
    for (int rank = 0; rank < 2; ++rank) {
      operations.push_back(allreduce(rank, "first"));
      operations.push_back(
          submit_one(job_->rank(rank), float_operation(data(rank), "second", OpKind::kBroadcast)));
    }
    ASSERT_TRUE(run(operations, seconds(1))) << "an operation never ended";
    const char* const cause = score > 0 ? "no channel can be opened" : "no backend can run";
    for (const auto& operation : operations)
      EXPECT_THAT(operation.status().message, HasSubstr(cause));
  }
}

/// Its connections break at the first use, because a rank dies.
class BreakingBackend final : public Backend {
 public:
  explicit BreakingBackend(std::function<void()> die) : die_(std::move(die)) {}
  std::string_view name() const noexcept override { return "breaking"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override {
    return 1;
  }
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override {
    die_();
    throw Error("MPI_Isend with rank 2 failed");
  }

 private:
  const std::function<void()> die_;
};

TEST_F(FailureTest, AnErrorWithADeathBehindItIsThatDeath) {
  start(3, std::make_shared<BreakingBackend>([this] { job_->kill(2); }));
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) operations.push_back(allreduce(rank, "x"));
  job_->rank(2).step();  // submits it, and takes no further step
  for (int round = 0; round < 20; ++round) {
    for (int rank = 0; rank < 2; ++rank) job_->rank(rank).step();
    clock_.advance(milliseconds(1));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const Status status = operations[static_cast<std::size_t>(rank)].status();
    EXPECT_EQ(status.code, StatusCode::kPeerLost) << status.message;
    EXPECT_EQ(status.rank, 2);
    EXPECT_THAT(status.message, HasSubstr("lost rank 2 (host localhost): it was killed"));
  }
}

/// A backend whose open() calls a function of the test.
class OpeningBackend final : public Backend {
 public:
  using Open = std::function<void(const ChannelSpec&)>;
  explicit OpeningBackend(Open open) : open_(std::move(open)) {}
  std::string_view name() const noexcept override { return "opening"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override {
    return 1;
  }
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Peers& peers) override {
    open_(spec);
    throw Error("rank " + std::to_string(peers.rank()) + " goes on");
  }

 private:
  const Open open_;
};

TEST_F(FailureTest, ABrokenConnectionToAnotherHostIsALostRank) {
  start(2, std::make_shared<OpeningBackend>([](const ChannelSpec&) {
          throw BrokenConnection("ucx: sending to rank 1 failed", 1);
        }),
        {"a", "b"});
  std::vector<Operation> operations;
  for (int rank = 0; rank < 2; ++rank) operations.push_back(allreduce(rank, "x"));
  job_->rank(1).step();  // submits it, and takes no further step
  job_->run_until(clock_, seconds(1), [&] {
    job_->rank(0).step();
    return operations[0].done();
  });
  ASSERT_TRUE(operations[0].done());
  const Status status = operations[0].status();
  EXPECT_EQ(status.code, StatusCode::kPeerLost) << status.message;
  EXPECT_EQ(status.rank, 1);
  EXPECT_THAT(status.message, AllOf(HasSubstr("lost rank 1 (host b)"), HasSubstr("'x'"),
                                    HasSubstr("ucx: sending to rank 1 failed")));
}

// Rank 1 ends because rank 2 has, and its connections break as it ends.
TEST_F(FailureTest, AReportedLossExplainsABrokenConnection) {
  const auto broken = [](int rank) {
    return BrokenConnection("the connection to rank " + std::to_string(rank) + " broke", rank);
  };
  start(3, std::make_shared<OpeningBackend>([&](const ChannelSpec& spec) {
          if (spec.set_rank != 0) throw broken(2);
          for (int round = 0; round < 5; ++round) {
            job_->rank(1).step();  // fails, and notifies the others
            clock_.advance(milliseconds(2));
          }
          throw broken(1);
        }),
        {"a", "b", "c"});
  std::vector<Operation> operations;
  for (int rank = 0; rank < 3; ++rank) operations.push_back(allreduce(rank, "x"));
  for (int round = 0; round < 20 && !operations[0].done(); ++round) {
    if (round == 0) job_->rank(2).step();
    for (int rank = 1; rank >= 0; --rank) job_->rank(rank).step();
    clock_.advance(milliseconds(1));
  }
  ASSERT_TRUE(operations[0].done());
  EXPECT_EQ(operations[0].status().rank, 2) << operations[0].status().message;
  EXPECT_THAT(operations[0].status().message, HasSubstr("lost rank 2 (host c)"));
}

/// Lets a test act inside a step, as another thread could: whenever the runtime reads the time.
class MeddlingClock final : public Clock {
 public:
  explicit MeddlingClock(const Clock& clock) : clock_(clock) {}
  TimePoint now() const noexcept override {
    if (const auto act = std::exchange(meddle, nullptr)) {
      act();
      meddle = act;
    }
    return clock_.now();
  }
  mutable std::function<void()> meddle = nullptr;

 private:
  const Clock& clock_;
};

TEST_F(FailureTest, AnOperationThatCrossesTheRemovalOfItsSetIsAUsageErrorAndTheRuntimeGoesOn) {
  MeddlingClock clock(clock_);
  LocalJobOptions options;
  options.runtime.background_thread = false;
  job_ = std::make_unique<LocalJob>(options, clock);
  data_.assign(2, std::vector<float>(8, 1.0F));
  const auto about_set = [&](const OperationParameters& parameters) {
    std::vector<Operation> operations;
    for (int rank = 0; rank < 2; ++rank) {
      operations.push_back(submit_one(job_->rank(rank), {.parameters = parameters}));
    }
    return operations;
  };
  const auto added = about_set(AddProcessSet{{0, 1}});
  ASSERT_TRUE(run(added));
  ASSERT_TRUE(added[0].status().ok()) << added[0].status().message;
  const int set = static_cast<int>(added[0].result());
  const auto removed = about_set(RemoveProcessSet{set});
  std::vector<Operation> late;
  clock.meddle = [&] {
    Submission submission = float_operation(data(1), "late" + std::to_string(late.size()));
    submission.process_set = set;
    try {
      late.push_back(submit_one(job_->rank(1), std::move(submission)));
    } catch (const UsageError&) {
      // The removal has been applied.
    }
  };
  ASSERT_TRUE(run(removed));
  clock.meddle = nullptr;
  ASSERT_TRUE(run(late));
  for (const auto& operation : late)
    EXPECT_EQ(operation.status().code, StatusCode::kUsage) << operation.status().message;
  const std::vector<Operation> next{allreduce(0, "w"), allreduce(1, "w")};
  ASSERT_TRUE(run(next));
  for (const auto& operation : next)
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  job_.reset();  // before the clock
}

TEST_F(FailureTest, ACorruptMessageFailsTheJobWithItsCauseEverywhere) {
  start(2);
  job_->network().corrupt_next_message_to(0);
  const std::vector<Operation> operations{allreduce(0, "x"), allreduce(1, "x")};
  ASSERT_TRUE(run(operations, seconds(1)));
  for (const auto& operation : operations) {
    EXPECT_EQ(operation.status().code, StatusCode::kInternal);
    EXPECT_THAT(operation.status().message, HasSubstr("corrupt message"));
  }
}

TEST_F(FailureTest, AFailureReportedByTheProgramReachesEveryRank) {
  start(3);
  const std::vector<Operation> operations{allreduce(0, "x"), allreduce(2, "x")};
  job_->rank(1).abort({StatusCode::kPeerLost, "rank 1 ran out of data", 1});
  ASSERT_TRUE(run(operations, seconds(1)));
  for (const auto& operation : operations)
    EXPECT_EQ(operation.status().message, "rank 1 ran out of data");
}

// A call of MPI that does not return after a loss keeps the coordinator from receiving messages.
// Its host must not report the coordinator as lost because of that.
TEST_F(FailureTest, OtherHostsLearnOfALossWithoutTheCoordinator) {
  for (const int hears : {1, 2}) {  // the ranks before it take no step
    start(5, {}, {"a", "a", "a", "b", "b"});
    const Operation operation = allreduce(hears, "x");
    job_->rank(4).abort({StatusCode::kPeerLost, "lost rank 3 (host b): process 7 ended", 3});
    for (int round = 0; round < 100 && !operation.done(); ++round) {
      job_->rank(hears).step();
      clock_.advance(milliseconds(1));
    }
    ASSERT_TRUE(operation.done());
    EXPECT_EQ(operation.status().message, "lost rank 3 (host b): process 7 ended");
  }
}

// The rank was stopped for too long, or ends with an exception and logs the others' error.
TEST_F(FailureTest, NoRankReportsThatItHasLostItself) {
  start(3);
  const std::vector<Operation> operations{allreduce(0, "x"), allreduce(1, "x")};
  job_->rank(2).abort({StatusCode::kPeerLost,
                       "lost rank 1 (host localhost): no sign of life; noticed by rank 2", 1});
  ASSERT_TRUE(run(operations, seconds(1)));
  EXPECT_EQ(operations[0].status().message,
            "lost rank 1 (host localhost): no sign of life; noticed by rank 2");
  EXPECT_EQ(
      operations[1].status().message,
      "the other ranks report this rank as lost: rank 1 (host localhost): no sign of life; noticed "
      "by rank 2");
  EXPECT_EQ(operations[1].status().rank, 1);
}

// A scheduler suspends jobs, a laptop sleeps, Ctrl-Z: no rank is lost because of silence during
// that time.
TEST_F(FailureTest, APauseOfTheWholeJobIsNoLoss) {
  for (const bool several_hosts : {false, true}) {
    start(3, {},
          several_hosts ? std::vector<std::string>{"a", "a", "b"} : std::vector<std::string>{});
    for (int times = 0; times < 3; ++times) {
      std::vector<Operation> operations{allreduce(0, "w"), allreduce(1, "w")};
      EXPECT_FALSE(run(operations, seconds(2)));
      clock_.advance(seconds(100));  // more than the peer timeout and the stall shutdown time
      EXPECT_FALSE(run(operations, seconds(2)));
      operations.push_back(allreduce(2, "w"));
      ASSERT_TRUE(run(operations, seconds(1)));
      for (const auto& operation : operations)
        EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    }
  }
}

TEST_F(FailureTest, ARankThatIsStoppedIsLostAtTheTimeoutAndNotBefore) {
  for (const bool several_hosts : {false, true}) {
    start(3, {},
          several_hosts ? std::vector<std::string>{"a", "b", "c"} : std::vector<std::string>{});
    ASSERT_TRUE(run({allreduce(0, "w"), allreduce(1, "w"), allreduce(2, "w")}));
    const TimePoint stopped = clock_.now();
    const std::vector<Operation> operations{allreduce(0, "x"), allreduce(1, "x")};
    while (!operations[0].done() && clock_.now() < stopped + seconds(20)) {
      for (const int rank : {0, 1}) job_->rank(rank).step();
      clock_.advance(milliseconds(1));
    }
    EXPECT_EQ(operations[0].status().code, StatusCode::kPeerLost);
    EXPECT_EQ(operations[0].status().rank, 2);
    EXPECT_GE(clock_.now() - stopped, milliseconds(2900))
        << several_hosts;  // its last sign of life is a little older
    EXPECT_LE(clock_.now() - stopped, milliseconds(3200)) << several_hosts;
  }
}

TEST_F(FailureTest, AnIdleJobIsNotAccused) {
  start(2);
  ASSERT_TRUE(run({allreduce(0, "w"), allreduce(1, "w")}));
  EXPECT_FALSE(job_->run_until(clock_, seconds(100), [] { return false; }));
  EXPECT_FALSE(job_->rank(0).failed());
  EXPECT_FALSE(job_->rank(1).failed());
}

}  // namespace
}  // namespace hvd::testing
