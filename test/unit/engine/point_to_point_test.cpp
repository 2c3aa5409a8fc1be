// Sends and recvs between the ranks of a job in one process, stepped in virtual time.
#include "engine/point_to_point.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include "base/clock.h"
#include "base/shared_segment.h"
#include "base/text.h"
#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Floats = std::vector<float>;

TensorView view(Floats& data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {reinterpret_cast<std::byte*>(data.data()), count, DataType::kFloat32, {}, {count}};
}

Floats numbers(std::size_t count, float first) {
  Floats data(count);
  std::iota(data.begin(), data.end(), first);
  return data;
}

LocalJobOptions options(int ranks, unsigned seed = 0) {
  LocalJobOptions made;
  made.size = ranks;
  made.runtime.background_thread = false;
  made.runtime.stall_warning = seconds(1);
  made.runtime.stall_shutdown = seconds(4);
  made.longest_delay = seed == 0 ? Duration::zero() : Duration(milliseconds(1));
  made.seed = seed;
  return made;
}

/// The ranks share memory, as those of one host do. A rank whose prefix differs cannot find the
/// memory of the others.
LocalJobOptions sharing(LocalJobOptions made, const std::vector<bool>& differs = {}) {
  static int jobs = 0;
  const std::string prefix = text(SharedSegment::kPrefix, ::getpid(), "-messages-", ++jobs);
  for (int rank = 0; rank < made.size; ++rank) {
    const bool other = !differs.empty() && differs[static_cast<std::size_t>(rank)];
    made.shared_memory_prefixes.push_back(other ? prefix + "-other" : prefix);
  }
  return made;
}

std::size_t segments_of_this_process() {
  const std::string own = text(SharedSegment::kPrefix, ::getpid(), "-").substr(1);
  std::size_t found = 0;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
    if (file.path().filename().string().starts_with(own)) ++found;
  return found;
}

class Messages {
 public:
  explicit Messages(const LocalJobOptions& options) : job_(options, clock_) {}
  explicit Messages(int ranks) : Messages(options(ranks)) {}

  LocalJob& job() { return job_; }
  Operation start(int rank, const Message& message) {
    return job_.rank(rank).submit({&message, 1}, Progress::kBackground).front();
  }
  Operation send(int rank, Floats& data, int to, std::int64_t tag = 0, int set = 0) {
    return start(rank, {.direction = Direction::kSend,
                        .tensor = view(data),
                        .peer = to,
                        .tag = tag,
                        .process_set = set});
  }
  Operation recv(int rank, Floats& data, int from, std::int64_t tag = 0, int set = 0) {
    return start(rank, {.direction = Direction::kReceive,
                        .tensor = view(data),
                        .peer = from,
                        .tag = tag,
                        .process_set = set});
  }
  bool run(const std::vector<Operation>& operations, Duration timeout = milliseconds(900)) {
    return job_.run_until(clock_, timeout, [&] {
      return std::all_of(operations.begin(), operations.end(),
                         [](const Operation& operation) { return operation.done(); });
    });
  }
  void pass(Duration time) {
    const TimePoint end = clock_.now() + time;
    job_.run_until(clock_, time + seconds(1), [&] { return clock_.now() >= end; });
  }
  TimePoint now() const { return clock_.now(); }

 private:
  VirtualClock clock_;
  LocalJob job_;
};

void expect_ok(const Operation& operation) {
  ASSERT_TRUE(operation.done());
  EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

class Size : public ::testing::TestWithParam<std::size_t> {};
// None, one, the largest eager one, the next, one piece, and sizes around several windows.
INSTANTIATE_TEST_SUITE_P(Floats, Size,
                         ::testing::Values(0, 1, 2048, 2049, 65536, 65537, 262144, 1000003));

TEST_P(Size, AMessageArrivesWhicheverSideIsFirst) {
  for (const bool send_first : {true, false}) {
    Messages messages(send_first ? options(2) : sharing(options(2)));
    Floats sent = numbers(GetParam(), 3);
    Floats received(GetParam(), -1);
    Operation send;
    Operation recv;
    if (send_first) send = messages.send(0, sent, 1);
    recv = messages.recv(1, received, 0);
    messages.pass(milliseconds(5));
    if (!send_first) send = messages.send(0, sent, 1);
    ASSERT_TRUE(messages.run({send, recv}));
    expect_ok(send);
    expect_ok(recv);
    EXPECT_EQ(received, sent);
    EXPECT_EQ(recv.result(), 0);
  }
}

TEST(PointToPoint, LargeMessagesBetweenRanksOfAHostGoThroughSharedMemory) {
  constexpr std::size_t kFloats = 1'000'000;
  const auto bytes_of_control_messages = [](const LocalJobOptions& job) {
    Messages messages(job);
    Floats sent = numbers(kFloats, 1);
    for (const int to : {1, 1, 2}) {
      Floats received(kFloats);
      const Operation send = messages.send(0, sent, to);
      const Operation recv = messages.recv(to, received, 0);
      EXPECT_TRUE(messages.run({send, recv}));
      EXPECT_EQ(received, sent);
    }
    return static_cast<std::size_t>(messages.job().rank(0).metrics().control_bytes_sent);
  };
  constexpr std::size_t kBytes = kFloats * sizeof(float);
  EXPECT_LT(bytes_of_control_messages(sharing(options(3))), kBytes / 100);
  EXPECT_GT(bytes_of_control_messages(options(3)), 3 * kBytes);
  // Rank 0 finds the memory of rank 1 only.
  const auto partly = bytes_of_control_messages(sharing(options(3), {false, false, true}));
  EXPECT_GT(partly, kBytes);
  EXPECT_LT(partly, 2 * kBytes);
}

TEST(PointToPoint, TheMemoryOfMessagesLeavesNoFile) {
  for (const bool found : {true, false}) {
    const std::size_t before = segments_of_this_process();
    Messages messages(sharing(options(2), {false, !found}));
    Floats sent = numbers(100'000, 1);
    Floats received(sent.size());
    ASSERT_TRUE(messages.run({messages.send(0, sent, 1), messages.recv(1, received, 0)}));
    EXPECT_EQ(segments_of_this_process(), before);
  }
}

TEST(PointToPoint, ASendIsDoneOnlyWhenItIsReceived) {
  Messages messages(2);
  Floats small = numbers(4, 0);
  const Operation send = messages.send(0, small, 1);
  messages.pass(milliseconds(100));
  EXPECT_FALSE(send.done());
  Floats received(4);
  const Operation recv = messages.recv(1, received, 0);
  EXPECT_TRUE(messages.run({send, recv}));
}

TEST(PointToPoint, TagsNamesAndSetsKeepMessagesApart) {
  Messages messages(3);
  Floats a = numbers(10, 1);
  Floats b = numbers(10, 100);
  Floats c = numbers(10, 1000);
  Floats from_tag(10);
  Floats from_name(10);
  Floats from_two(10);
  const std::vector<Operation> operations = {
      messages.send(0, a, 1, 7),
      messages.start(0, {.tensor = view(b), .peer = 1, .name = "7"}),
      messages.send(2, c, 1, 7),
      messages.recv(1, from_two, 2, 7),
      messages.start(
          1, {.direction = Direction::kReceive, .tensor = view(from_name), .peer = 0, .name = "7"}),
      messages.recv(1, from_tag, 0, 7),
  };
  ASSERT_TRUE(messages.run(operations));
  for (const Operation& operation : operations) expect_ok(operation);
  EXPECT_EQ(from_tag, a);
  EXPECT_EQ(from_name, b);
  EXPECT_EQ(from_two, c);
}

TEST(PointToPoint, ARecvFromAnyRankReportsTheSource) {
  Messages messages(4);
  std::vector<Floats> sent;
  for (int rank = 0; rank < 4; ++rank) sent.push_back(numbers(5000, static_cast<float>(rank)));
  std::vector<Floats> received(3, Floats(5000));
  std::vector<Operation> recvs;
  std::vector<Operation> all;
  for (Floats& data : received) recvs.push_back(messages.recv(0, data, kAnySource, 1));
  all = recvs;
  for (const int rank : {3, 1, 2})
    all.push_back(messages.send(rank, sent[static_cast<std::size_t>(rank)], 0, 1));
  ASSERT_TRUE(messages.run(all));
  std::vector<std::int64_t> sources;
  for (std::size_t i = 0; i < 3; ++i) {
    expect_ok(recvs[i]);
    sources.push_back(recvs[i].result());
    EXPECT_EQ(received[i], sent[static_cast<std::size_t>(recvs[i].result())]);
  }
  std::sort(sources.begin(), sources.end());
  EXPECT_EQ(sources, (std::vector<std::int64_t>{1, 2, 3}));
}

TEST(PointToPoint, MessagesInAnyOrderAndSizeArriveOverADelayedNetwork) {
  constexpr int kRanks = 3;
  constexpr std::size_t kMessages = 40;
  for (unsigned seed = 1; seed <= 30; ++seed) {
    std::mt19937 random(seed);
    const LocalJobOptions job = options(kRanks, seed);
    Messages messages(seed % 3 == 0 ? job : sharing(job, {false, false, seed % 3 == 1}));
    struct Side {
      int rank;
      int peer;
      std::int64_t tag;
      std::size_t index;
      bool sends;
    };
    std::vector<Side> sides;
    std::vector<Floats> sent;
    std::vector<Floats> received;
    for (std::size_t i = 0; i < kMessages; ++i) {
      const int from = static_cast<int>(random() % kRanks);
      const int to = (from + 1 + static_cast<int>(random() % (kRanks - 1))) % kRanks;
      const std::size_t size = random() % 4 == 0 ? random() % 200'000 : random() % 3000;
      sent.push_back(numbers(size, static_cast<float>(i)));
      received.emplace_back(size);
      sides.push_back({from, to, static_cast<std::int64_t>(i), i, true});
      sides.push_back({to, from, static_cast<std::int64_t>(i), i, false});
    }
    std::shuffle(sides.begin(), sides.end(), random);
    std::vector<Operation> operations;
    for (const Side& side : sides) {
      operations.push_back(
          side.sends ? messages.send(side.rank, sent[side.index], side.peer, side.tag)
                     : messages.recv(side.rank, received[side.index], side.peer, side.tag));
      for (unsigned steps = random() % 5; steps > 0; --steps) messages.job().step_all();
    }
    ASSERT_TRUE(messages.run(operations, seconds(3))) << "seed " << seed;
    for (const Operation& operation : operations) expect_ok(operation);
    EXPECT_EQ(received, sent) << "seed " << seed;
  }
}

TEST(PointToPoint, MessagesOfOneTagArriveInTheOrderOfTheSends) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    Messages messages(options(2, seed));
    std::vector<Floats> sent;
    std::vector<Floats> received;
    std::vector<Operation> operations;
    // Alternately eager and not, so that one kind could overtake the other.
    for (std::size_t i = 0; i < 12; ++i) {
      sent.push_back(numbers(i % 2 == 0 ? 3000 : 10, static_cast<float>(100 * i)));
      received.emplace_back(sent.back().size());
    }
    for (std::size_t i = 0; i < 12; ++i) {
      operations.push_back(messages.send(0, sent[i], 1));
      if (random() % 2 == 0) messages.job().step_all();
    }
    for (Floats& data : received) operations.push_back(messages.recv(1, data, 0));
    ASSERT_TRUE(messages.run(operations)) << "seed " << seed;
    EXPECT_EQ(received, sent) << "seed " << seed;
  }
}

TEST(PointToPoint, ADisagreementIsAMismatchOnBothSides) {
  Messages messages(2);
  Floats four = numbers(4, 0);
  Floats five(5);
  Operation send = messages.send(0, four, 1, 9);
  Operation recv = messages.recv(1, five, 0, 9);
  ASSERT_TRUE(messages.run({send, recv}));
  for (const Operation& operation : {send, recv}) {
    EXPECT_EQ(operation.status().code, StatusCode::kMismatch);
    EXPECT_THAT(
        operation.status().message,
        AllOf(HasSubstr("message (tag 9) from rank 0 to rank 1"),
              HasSubstr("rank 0 sends 4 elements of float32, rank 1 expects 5 of float32")));
  }
  std::vector<std::int32_t> whole(4);
  send = messages.send(0, four, 1);
  recv = messages.start(
      1, {.direction = Direction::kReceive,
          .tensor = {reinterpret_cast<std::byte*>(whole.data()), 4, DataType::kInt32, {}, {4}},
          .peer = 0});
  ASSERT_TRUE(messages.run({send, recv}));
  EXPECT_EQ(send.status().code, StatusCode::kMismatch);
  EXPECT_EQ(recv.status().message, send.status().message);
  Floats received(4);  // the runtime goes on
  send = messages.send(0, four, 1);
  recv = messages.recv(1, received, 0);
  ASSERT_TRUE(messages.run({send, recv}));
  EXPECT_EQ(received, four);
}

TEST(PointToPoint, ARecvWithoutASendStallsAndSoDoesTheLateSend) {
  Messages messages(3);
  Floats data(10);
  Floats other = numbers(10, 5);
  const TimePoint begin = messages.now();
  const Operation recv = messages.recv(0, data, 1, 5);
  const Operation elsewhere = messages.send(1, other, 2, 6);
  ASSERT_TRUE(messages.run({recv, elsewhere}, seconds(6)));
  EXPECT_GE(messages.now() - begin, seconds(4));
  EXPECT_EQ(recv.status().code, StatusCode::kStalled);
  EXPECT_THAT(recv.status().message, AllOf(HasSubstr("recv (tag 5) from rank 1 on rank 0"),
                                           HasSubstr("rank 0 waits for recv (tag 5) from rank 1"),
                                           HasSubstr("rank 1 waits for send (tag 6) to rank 2")));
  EXPECT_THAT(elsewhere.status().message,
              AllOf(HasSubstr("send (tag 6) from rank 1 to rank 2"),
                    HasSubstr("rank 2 has no operation outstanding"),
                    HasSubstr("rank 1 waits for send (tag 6) to rank 2")));
  const Operation late = messages.send(1, other, 0, 5);
  ASSERT_TRUE(messages.run({late}));
  EXPECT_EQ(late.status().code, StatusCode::kStalled);
  EXPECT_THAT(late.status().message, HasSubstr("recv (tag 5) from rank 1 on rank 0"));
  Floats received(10);
  const Operation send = messages.send(1, other, 0, 5);
  const Operation again = messages.recv(0, received, 1, 5);
  ASSERT_TRUE(messages.run({send, again}));
  EXPECT_EQ(received, other);
}

TEST(PointToPoint, ASendWithoutARecvStallsAndSoDoesTheLateRecv) {
  for (const std::size_t size : {std::size_t{10}, std::size_t{100'000}}) {
    Messages messages(2);
    Floats sent = numbers(size, 5);
    Floats received(size);
    const Operation send = messages.send(0, sent, 1, 5);
    ASSERT_TRUE(messages.run({send}, seconds(6)));
    EXPECT_EQ(send.status().code, StatusCode::kStalled);
    Operation recv = messages.recv(1, received, 0, 5);
    ASSERT_TRUE(messages.run({recv}));
    EXPECT_EQ(recv.status().code, StatusCode::kStalled);
    EXPECT_THAT(recv.status().message, HasSubstr("send (tag 5) from rank 0 to rank 1"));
    recv = messages.recv(1, received, 0, 5);
    const Operation again = messages.send(0, sent, 1, 5);
    ASSERT_TRUE(messages.run({recv, again}));
    EXPECT_EQ(received, sent);
  }
}

TEST(PointToPoint, ARecvFromAnyRankNamesWhatTheOthersDo) {
  Messages messages(3);
  Floats data(10);
  const Operation recv = messages.recv(0, data, kAnySource);
  ASSERT_TRUE(messages.run({recv}, seconds(6)));
  EXPECT_EQ(recv.status().code, StatusCode::kStalled);
  EXPECT_THAT(recv.status().message, AllOf(HasSubstr("recv (tag 0) from any rank on rank 0"),
                                           HasSubstr("rank 1 has no operation outstanding"),
                                           HasSubstr("rank 2 has no operation outstanding")));
}

TEST(PointToPoint, ALostRankEndsTheMessagesOfAllOthers) {
  Messages messages(3);
  Floats data(10);
  Floats large = numbers(3'000'000, 0);
  Floats taken(3'000'000);
  const Operation waits = messages.recv(0, data, 2);
  const Operation sends = messages.send(1, large, 2);
  messages.recv(2, taken, 1);
  messages.job().step_all();
  messages.job().step_all();
  ASSERT_FALSE(sends.done());
  messages.job().kill(2);
  ASSERT_TRUE(messages.run({waits, sends}, seconds(3)));
  for (const Operation& operation : {waits, sends}) {
    EXPECT_EQ(operation.status().code, StatusCode::kPeerLost) << operation.status().message;
    EXPECT_EQ(operation.status().rank, 2);
    EXPECT_THAT(operation.status().message, HasSubstr("lost rank 2"));
  }
}

// The offer fails when the operation is a send of the engine already.
TEST(PointToPoint, ASendWhoseOfferCannotBeSentEndsOnce) {
  Messages messages(2);
  Floats data(10);
  int calls = 0;
  messages.job().network().refuse_next_message_to(1);
  const Operation sends = messages.start(0, {.direction = Direction::kSend,
                                             .tensor = view(data),
                                             .peer = 1,
                                             .on_done = [&](const Status&) { ++calls; }});
  ASSERT_TRUE(messages.run({sends}));
  EXPECT_THAT(sends.status().message, HasSubstr("the message was refused"));
  EXPECT_EQ(calls, 1);
}

// In real time, because shutdown() waits for the other rank.
TEST(PointToPoint, ARankThatLeavesEndsTheMessagesThatItWillNotMatch) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  const auto start = [&job](int rank, Direction direction, Floats& data, int peer, int tag) {
    const Message message{.direction = direction, .tensor = view(data), .peer = peer, .tag = tag};
    return job.rank(rank).submit({&message, 1}, Progress::kBackground).front();
  };
  Floats small = numbers(10, 1);
  Floats large = numbers(100'000, 1);
  Floats data(10);
  std::vector<Operation> waiting = {start(0, Direction::kReceive, data, 1, 0),
                                    start(0, Direction::kSend, small, 1, 0),
                                    start(0, Direction::kSend, large, 1, 1)};
  const Operation own = start(1, Direction::kReceive, data, 0, 7);
  std::thread leaves([&job] { job.rank(1).shutdown(); });
  EXPECT_TRUE(waiting[0].wait_for(seconds(10)));
  waiting.push_back(start(0, Direction::kSend, small, 1, 4));
  waiting.push_back(start(0, Direction::kReceive, data, kAnySource, 2));
  for (const Operation& operation : waiting) {
    ASSERT_TRUE(operation.wait_for(seconds(10)));
    EXPECT_EQ(operation.status().code, StatusCode::kShutdown) << operation.status().message;
    EXPECT_THAT(operation.status().message, HasSubstr("rank 1"));
  }
  EXPECT_FALSE(own.done());
  job.rank(0).shutdown();
  leaves.join();
  ASSERT_TRUE(own.done());
  EXPECT_EQ(own.status().code, StatusCode::kShutdown);
}

TEST(PointToPoint, ARemovedSetEndsItsMessages) {
  Messages messages(2);
  std::vector<Operation> both;
  for (int rank = 0; rank < 2; ++rank)
    both.push_back(submit_one(messages.job().rank(rank), {.parameters = AddProcessSet{{0, 1}}}));
  ASSERT_TRUE(messages.run(both));
  const int set = static_cast<int>(both.front().result());
  Floats data(10);
  Floats first = numbers(10, 2);
  const Operation used = messages.send(0, first, 1, 0, set);
  const Operation taken = messages.recv(1, data, 0, 0, set);
  ASSERT_TRUE(messages.run({used, taken}));
  EXPECT_EQ(data, first);
  const Operation send = messages.send(0, first, 1, 1, set);
  const Operation recv = messages.recv(1, data, 0, 2, set);
  messages.pass(milliseconds(5));
  for (int rank = 0; rank < 2; ++rank)
    submit_one(messages.job().rank(rank), {.parameters = RemoveProcessSet{set}});
  ASSERT_TRUE(messages.run({send, recv}));
  EXPECT_EQ(send.status().code, StatusCode::kUsage);
  EXPECT_THAT(recv.status().message, HasSubstr("the process set was removed"));
  EXPECT_THROW(messages.send(0, first, 1, 1, set), UsageError);
}

TEST(PointToPoint, WrongCallsAreRefused) {
  Messages messages(3);
  Floats data(10);
  EXPECT_THROW(messages.send(0, data, 0), UsageError);
  EXPECT_THROW(messages.send(0, data, 3), UsageError);
  EXPECT_THROW(messages.send(0, data, kAnySource), UsageError);
  EXPECT_THROW(messages.recv(0, data, -2), UsageError);
  EXPECT_THROW(messages.recv(0, data, 1, 0, 7), UsageError);
  EXPECT_THROW(messages.start(0, {.tensor = {nullptr, 3}, .peer = 1}), UsageError);
  EXPECT_THROW(
      messages.start(
          0, {.tensor = {nullptr, 0, DataType::kFloat32, {DeviceType::kCuda, 0}}, .peer = 1}),
      UsageError);
  EXPECT_THROW(messages.start(0, {.tensor = view(data), .peer = 1, .name = std::string(5000, 'x')}),
               UsageError);
  Messages alone(1);
  EXPECT_THROW(alone.recv(0, data, kAnySource), UsageError);
}

TEST(PointToPoint, ACallbackRunsOnceWithTheStatus) {
  Messages messages(2);
  Floats data = numbers(10, 0);
  Floats received(10);
  std::vector<StatusCode> seen;
  auto memory = std::make_shared<int>(1);
  Message message{.tensor = view(data), .peer = 1, .keep_alive = memory};
  message.on_done = [&seen](const Status& status) { seen.push_back(status.code); };
  const Operation send = messages.start(0, message);
  message = {};
  EXPECT_EQ(memory.use_count(), 2);
  const Operation recv = messages.recv(1, received, 0);
  ASSERT_TRUE(messages.run({send, recv}));
  EXPECT_EQ(seen, std::vector{StatusCode::kOk});
  EXPECT_EQ(memory.use_count(), 1);
}

// A receiver buffers at most 64 KiB of each sender, however many small messages are under way.
TEST(PointToPoint, ManySmallMessagesWaitWithinTheBound) {
  Messages messages(2);
  std::vector<Floats> sent;
  std::vector<Operation> operations;
  for (int i = 0; i < 100; ++i) sent.push_back(numbers(1000, static_cast<float>(i)));
  for (std::size_t i = 0; i < sent.size(); ++i)
    operations.push_back(messages.send(0, sent[i], 1, static_cast<std::int64_t>(i)));
  messages.pass(milliseconds(10));
  const std::uint64_t bytes = messages.job().rank(0).metrics().control_bytes_sent;
  EXPECT_LE(bytes, (64u << 10) + 100u * 32u);
  EXPECT_GE(bytes, 60u << 10);
  std::vector<Floats> received(sent.size(), Floats(1000));
  for (std::size_t i = sent.size(); i-- > 0;)
    operations.push_back(messages.recv(1, received[i], 0, static_cast<std::int64_t>(i)));
  ASSERT_TRUE(messages.run(operations));
  EXPECT_EQ(received, sent);
}

// The collective is complete while most of the message is still to be sent.
TEST(PointToPoint, ACollectiveDoesNotWaitForALargeMessage) {
  Messages messages(2);
  Floats sent = numbers(16 << 20, 0);
  Floats received(16 << 20);
  const Operation send = messages.send(0, sent, 1);
  const Operation recv = messages.recv(1, received, 0);
  messages.pass(std::chrono::microseconds(20));
  const std::uint64_t bytes = messages.job().rank(0).metrics().control_bytes_sent;
  EXPECT_GT(bytes, 1u << 20);
  std::vector<Floats> data(2, Floats(100, 1));
  std::vector<Operation> sums;
  for (int rank = 0; rank < 2; ++rank)
    sums.push_back(submit_one(messages.job().rank(rank),
                              float_operation(data[static_cast<std::size_t>(rank)], "sum")));
  ASSERT_TRUE(messages.run(sums));
  EXPECT_FALSE(send.done());
  EXPECT_LE(messages.job().rank(0).metrics().control_bytes_sent - bytes, 6u << 20);
  EXPECT_EQ(data[0][0], 2);
  ASSERT_TRUE(messages.run({send, recv}));
  EXPECT_EQ(received, sent);
}

TEST(PointToPoint, NoMessageIsNegotiated) {
  Messages messages(2);
  Floats data = numbers(10, 0);
  Floats received(10);
  messages.pass(milliseconds(10));
  const Metrics before = messages.job().rank(0).metrics();
  for (int i = 0; i < 5; ++i)
    ASSERT_TRUE(messages.run({messages.send(0, data, 1), messages.recv(1, received, 0)}));
  const Metrics after = messages.job().rank(0).metrics();
  EXPECT_EQ(after.negotiated_operations, before.negotiated_operations);
  EXPECT_EQ(after.plans_applied, before.plans_applied);
  EXPECT_EQ(after.control_messages_sent - before.control_messages_sent, 5u) << "an offer each";
  EXPECT_EQ(after.completed_operations - before.completed_operations, 5u);
}

}  // namespace
}  // namespace hvd::testing
