// Descriptions of waits. Ranks of one process, mostly stepped in virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <set>
#include <thread>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

constexpr Duration kLimit = milliseconds(300);

LocalJobOptions stepped(int ranks) {
  LocalJobOptions options;
  options.size = ranks;
  options.runtime.background_thread = false;
  return options;
}

class DescribeWaitTest : public ::testing::Test {
 protected:
  void make(const LocalJobOptions& options) {
    data_.resize(static_cast<std::size_t>(options.size), std::vector<float>(4, 1));
    job_ = std::make_unique<LocalJob>(options, clock_);
  }
  Operation submit(int rank, const std::string& name, OpKind kind = OpKind::kAllreduce) {
    return submit_one(job_->rank(rank),
                      float_operation(data_[static_cast<std::size_t>(rank)], name, kind));
  }
  Operation message(int rank, Direction direction, int peer, std::int64_t tag) {
    const Submission form = float_operation(data_[static_cast<std::size_t>(rank)], "");
    const Message one{.direction = direction, .tensor = form.input, .peer = peer, .tag = tag};
    return job_->rank(rank).submit({&one, 1}, Progress::kBackground).front();
  }
  void pass(Duration time) {
    const TimePoint end = clock_.now() + time;
    step_until([&] { return clock_.now() >= end; });
  }
  /// Steps all ranks but the stopped ones.
  template <class Done>
  void step_until(const Done& done) {
    const TimePoint limit = clock_.now() + seconds(1);
    while (!done() && clock_.now() < limit) {
      for (int rank = 0; rank < job_->size(); ++rank) {
        if (!stopped_.contains(rank)) job_->rank(rank).step();
      }
      clock_.advance(std::chrono::microseconds(100));
    }
  }
  bool run(const std::vector<Operation>& operations) {
    return job_->run_until(clock_, milliseconds(500), [&] {
      return std::ranges::all_of(operations, [](const Operation& one) { return one.done(); });
    });
  }
  std::string describe(int rank, const Operation& operation) {
    const TimePoint begin = clock_.now();
    const auto description = job_->rank(rank).request_description(operation, kLimit);
    step_until([&] { return description->written(); });
    EXPECT_TRUE(description->written());
    took_ = clock_.now() - begin;
    return description->written() ? description->text() : "(nothing)";
  }
  /// Runs steps of one allreduce until the ranks repeat them without plans.
  void replay() {
    const int size = job_->size();
    for (int step = 0; step < 8; ++step) {
      std::vector<Operation> all;
      for (int rank = 0; rank < size; ++rank) all.push_back(submit(rank, "step"));
      ASSERT_TRUE(run(all));
    }
    ASSERT_GT(replayed(0), 0u);
  }
  std::uint64_t replayed(int rank) { return job_->rank(rank).metrics().locked_operations; }

  VirtualClock clock_;
  std::vector<std::vector<float>> data_;
  std::unique_ptr<LocalJob> job_;
  std::set<int> stopped_;
  Duration took_{};
};

TEST_F(DescribeWaitTest, ItNamesTheMissingRanksAndTheirCallsOnEveryRank) {
  for (const int asking : {0, 1, 2}) {
    make(stepped(3));
    const int other = (asking + 1) % 3;
    const int silent = (asking + 2) % 3;
    const Operation ours = submit(asking, "a");
    const Operation theirs = submit(other, "b", OpKind::kBroadcast);
    pass(milliseconds(400));
    const std::string text = describe(asking, ours);
    EXPECT_LT(took_, milliseconds(50));
    const std::string of_other = "rank " + std::to_string(other) +
                                 " (localhost) last submitted broadcast 'b' 0.4 s ago and waits "
                                 "for broadcast 'b'";
    const std::string of_silent = "rank " + std::to_string(silent) +
                                  " (localhost) has submitted no operation yet and has no "
                                  "operation outstanding";
    EXPECT_EQ(text,
              "allreduce 'a' has waited 0.4 s for 2 of 3 ranks: " +
                  (other < silent ? of_other + "; " + of_silent : of_silent + "; " + of_other));
    // The operations continue.
    std::vector<Operation> all = {ours, theirs};
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != asking) all.push_back(submit(rank, "a"));
      if (rank != other) all.push_back(submit(rank, "b", OpKind::kBroadcast));
    }
    ASSERT_TRUE(run(all));
    for (const Operation& one : all) EXPECT_TRUE(one.status().ok()) << one.status().message;
    EXPECT_EQ(describe(asking, ours), "");
  }
}

TEST_F(DescribeWaitTest, AReplayedScheduleIsDescribedAndContinues) {
  for (const bool two_hosts : {false, true}) {
    LocalJobOptions options = stepped(3);
    options.longest_delay = milliseconds(1);
    if (two_hosts) options.hosts = {"one", "two", "two"};
    make(options);
    replay();
    const std::uint64_t plans = job_->rank(0).metrics().plans_applied;
    const std::uint64_t before = replayed(2);
    std::vector<Operation> all = {submit(0, "step"), submit(1, "step")};
    const Operation receiving = message(2, Direction::kReceive, 0, 7);
    pass(milliseconds(200));
    const std::string text = describe(1, all[1]);
    EXPECT_THAT(text,
                AllOf(StartsWith("allreduce 'step' has waited 0.2 s for 1 of 3 ranks: rank 2"),
                      HasSubstr("last submitted recv (tag 7) from rank 0 0.2 s ago and waits "
                                "for recv (tag 7) from rank 0")));
    all.push_back(submit(2, "step"));
    all.push_back(message(0, Direction::kSend, 2, 7));
    all.push_back(receiving);
    ASSERT_TRUE(run(all));
    EXPECT_EQ(replayed(2), before + 1);
    EXPECT_EQ(job_->rank(0).metrics().plans_applied, plans) << "the replay was left";
  }
}

TEST_F(DescribeWaitTest, ReportsThatTheTreeHoldsBackDoNotCountAsMissing) {
  LocalJobOptions options = stepped(14);
  options.runtime.control_radix = 2;
  options.longest_delay = milliseconds(1);
  for (int rank = 0; rank < 14; ++rank) options.hosts.push_back("host" + std::to_string(rank / 2));
  make(options);
  std::vector<Operation> all;
  for (int rank = 0; rank < 14; ++rank) {
    if (rank != 9) all.push_back(submit(rank, "w"));
  }
  pass(milliseconds(20));
  for (const std::size_t asking : {0u, 8u, 12u}) {
    const int rank = asking < 9 ? static_cast<int>(asking) : static_cast<int>(asking) + 1;
    EXPECT_THAT(describe(rank, all[asking]), HasSubstr("for 1 of 14 ranks: rank 9 (host4)"));
  }
  all.push_back(submit(9, "w"));
  ASSERT_TRUE(run(all));
}

TEST_F(DescribeWaitTest, RanksThatDoNotReplyAreNamed) {
  make(stepped(3));
  const std::vector<Operation> begun = {submit(0, "a"), submit(1, "a"), submit(2, "b")};
  pass(milliseconds(50));
  stopped_ = {2};
  EXPECT_THAT(
      describe(0, begun[0]),
      MatchesRegex("allreduce 'a' has waited 0.3 s for 1 of 3 ranks: rank 2 .localhost. has "
                   "not replied for 0.2 s, and as far as rank 0 knows it last submitted 'b' "
                   "0.[23] s ago and waits for allreduce 'b'"));
  EXPECT_LT(took_, kLimit);
  stopped_ = {0};
  const std::string text = describe(1, begun[1]);
  EXPECT_THAT(text, HasSubstr("rank 0, which knows which of them are missing, has not replied for "
                              "0.3 s"));
  EXPECT_LE(took_, kLimit + milliseconds(1));
}

TEST_F(DescribeWaitTest, AMemberWaitsForTheRestOfItsGroup) {
  make(stepped(2));
  std::vector<Operation> members;
  for (int rank = 0; rank < 2; ++rank) {
    Submission first = float_operation(data_[static_cast<std::size_t>(rank)], "first");
    first.group = "g";
    first.group_size = 2;
    members.push_back(submit_one(job_->rank(rank), first));
  }
  pass(milliseconds(10));
  EXPECT_THAT(describe(1, members[1]),
              HasSubstr("for the rest of group 'g', of whose 2 members 1 were submitted by some "
                        "rank and 1 by every rank"));
}

TEST_F(DescribeWaitTest, ASetThatItsMembersMakeLacksAMember) {
  make(stepped(3));
  Submission making{.name = "set", .parameters = AddProcessSet{{0, 2}, true}};
  const Operation made = submit_one(job_->rank(2), making);
  pass(milliseconds(10));
  EXPECT_THAT(describe(2, made), HasSubstr("for 1 of 2 ranks: rank 0 (localhost) has submitted no "
                                           "operation yet"));
  const Operation too = submit_one(job_->rank(0), making);
  ASSERT_TRUE(run({made, too}));
}

TEST_F(DescribeWaitTest, SendAndRecvShowBothSides) {
  make(stepped(3));
  const Operation sent = message(0, Direction::kSend, 1, 5);
  const Operation received = message(1, Direction::kReceive, 0, 6);
  const Operation any = message(2, Direction::kReceive, kAnySource, 1);
  pass(milliseconds(100));
  EXPECT_EQ(describe(0, sent),
            "send (tag 5) to rank 1 has waited 0.1 s for its recv: rank 0 waits for send (tag 5) "
            "to rank 1; rank 1 waits for recv (tag 6) from rank 0");
  EXPECT_EQ(describe(1, received),
            "recv (tag 6) from rank 0 has waited 0.1 s for its send: rank 1 waits for recv (tag 6) "
            "from rank 0; rank 0 waits for send (tag 5) to rank 1");
  EXPECT_THAT(describe(2, any), AllOf(HasSubstr("rank 0 waits for send (tag 5) to rank 1"),
                                      HasSubstr("rank 1 waits for recv (tag 6) from rank 0")));
  stopped_ = {1};
  EXPECT_THAT(describe(0, sent), HasSubstr("rank 1 has not replied for 0.3 s"));
}

TEST_F(DescribeWaitTest, AMatchedMessageShowsHowFarItIs) {
  make(stepped(2));
  data_[0].resize(4 << 20);
  data_[1].resize(4 << 20);
  const Operation sent = message(0, Direction::kSend, 1, 5);
  const Operation received = message(1, Direction::kReceive, 0, 5);
  for (int round = 0; round < 4; ++round) job_->step_all();
  ASSERT_FALSE(received.done());
  EXPECT_THAT(describe(1, received), MatchesRegex("recv .tag 5. from rank 0 has waited .* and has "
                                                  "received [0-9]+ of 16777216 bytes"));
  ASSERT_TRUE(run({sent, received}));
}

// --- with threads ---

TEST(DescribeWait, ItReturnsAtOnceWhenTheRanksReply) {
  const SteadyClock clock;
  for (const ProgressMode progress : {ProgressMode::kBackground, ProgressMode::kInline}) {
    LocalJobOptions options;
    options.runtime.progress = progress;
    LocalJob job(options, clock);
    std::vector<std::vector<float>> data(3, std::vector<float>(4, 1));
    const Operation early = submit_one(job.rank(0), float_operation(data[0], "w"));
    EXPECT_FALSE(early.wait_for(milliseconds(20)));
    const TimePoint begin = clock.now();
    EXPECT_THAT(
        early.describe_wait(seconds(20)),
        AllOf(HasSubstr("allreduce 'w' has waited"),
              HasSubstr("for 1 of 2 ranks: rank 1 (localhost) has submitted no operation")));
    EXPECT_LT(clock.now() - begin, seconds(10));
    const Operation late = submit_one(job.rank(1), float_operation(data[1], "w"));
    EXPECT_TRUE(late.wait_for(seconds(60)));
    EXPECT_TRUE(early.wait_for(seconds(60)));
    EXPECT_TRUE(early.status().ok()) << early.status().message;
    EXPECT_EQ(early.describe_wait(), "");
    job.shut_down();
  }
}

TEST(DescribeWait, WrongCallsAreRefused) {
  EXPECT_THROW((void)Operation().describe_wait(), UsageError);
  const SteadyClock clock;
  LocalJob job({}, clock);
  std::vector<float> data(4, 1);
  const Operation waiting = submit_one(job.rank(0), float_operation(data, "w"));
  std::promise<std::string> refusal;
  Submission calling = {.name = "calls", .parameters = Barrier{}};
  calling.on_done = [&](const Status&, const EventPtr&) {
    try {
      (void)waiting.describe_wait();
      refusal.set_value("none");
    } catch (const UsageError& error) {
      refusal.set_value(error.what());
    }
  };
  submit_one(job.rank(0), calling);
  submit_one(job.rank(1), {.name = "calls", .parameters = Barrier{}});
  EXPECT_THAT(refusal.get_future().get(), HasSubstr("a callback must not wait for hvd"));
}

TEST(DescribeWait, AFailureEndsIt) {
  const SteadyClock clock;
  LocalJob job({}, clock);
  std::vector<float> data(4, 1);
  const Operation never = submit_one(job.rank(0), float_operation(data, "never"));
  job.kill(1);
  std::jthread fails([&] {
    while (!job.rank(0).has_waiters()) std::this_thread::sleep_for(milliseconds(1));
    job.rank(0).abort({StatusCode::kPeerLost, "rank 1 is gone", 1});
  });
  EXPECT_EQ(never.describe_wait(seconds(60)), "");
  EXPECT_EQ(never.status().code, StatusCode::kPeerLost);
}

}  // namespace
}  // namespace hvd::testing
