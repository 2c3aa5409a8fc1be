// Messages that two threads pass while both wait for them: each rank has threads and the memory
// that the ranks of a host share.
#include "engine/quick_messages.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/runtime.h"
#include "hvd/error.h"
#include "support/fake_carrier.h"
#include "support/join_nodes.h"

namespace hvd::testing {
namespace {

using runtime::QuickMessages;
using runtime::Runtime;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<std::byte>;

TensorView view(Bytes& data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {data.data(), count, DataType::kUInt8, {}, {count}};
}

Bytes filled(int number, std::size_t size = 8) {
  return Bytes(size, static_cast<std::byte>(number));
}

/// A job on one host whose ranks are runtimes with threads of their own.
class Job {
 public:
  explicit Job(int size, const runtime::RuntimeOptions& options = {})
      : network_(FakeNetwork::create(size, 7)), nodes_(join_nodes(size)) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(
          Runtime::create(options,
                          message::make_control_plane(network_->carrier(rank),
                                                      nodes_[static_cast<std::size_t>(rank)]),
                          {}, clock_));
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    std::vector<std::jthread> threads;
    for (const auto& rank : ranks_)
      threads.emplace_back([&rank] { rank->shutdown(std::chrono::seconds(10)); });
  }

  Runtime& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  /// Whether ranks of this job may pass quick messages on this machine.
  bool quick() const { return ranks_.front()->progress_policy().spins; }

  /// As hvd::send() and hvd::recv(). @return the other rank
  int pass(int rank, const Message& message) {
    Runtime& runtime = (*this)[rank];
    if (const auto peer = runtime.pass_quickly(message)) {
      passed_.fetch_add(1);
      return *peer;
    }
    const Operation operation = start(rank, message);
    operation.wait();
    operation.status().raise_if_error();
    return static_cast<int>(operation.result());
  }
  void send(int rank, Bytes data, int to, std::int64_t tag = 0) {
    pass(rank, {.direction = Direction::kSend, .tensor = view(data), .peer = to, .tag = tag});
  }
  int recv(int rank, Bytes& data, int from, std::int64_t tag = 0) {
    return pass(rank,
                {.direction = Direction::kReceive, .tensor = view(data), .peer = from, .tag = tag});
  }
  /// The box that a rank uses in send().
  MessageBox box(int from, int to) {
    return nodes_[static_cast<std::size_t>(from)]->message_boxes(to)->outgoing;
  }
  Operation start(int rank, const Message& message) {
    return (*this)[rank].submit(std::span(&message, 1), Progress::kBackground).front();
  }
  int passed() const { return passed_.load(); }

 private:
  const SteadyClock clock_;
  std::shared_ptr<FakeNetwork> network_;
  std::vector<std::shared_ptr<host::Node>> nodes_;
  std::vector<std::shared_ptr<Runtime>> ranks_;
  std::atomic<int> passed_{0};
};

TEST(QuickMessages, APingPongNeedsNoControlMessages) {
  Job job(2);
  if (!job.quick()) GTEST_SKIP() << "the ranks have no cores to wait on";
  constexpr int kMinPassed = 100;
  const auto limit = std::chrono::steady_clock::now() + seconds(60);
  int rounds = 0;
  std::atomic<bool> enough{false};
  std::thread other([&] {
    for (Bytes data = filled(0); data != filled(255);) {
      job.recv(1, data, 0);
      job.send(1, data, 0);
    }
  });
  while (!enough.load()) {
    Bytes back(8);
    enough.store(job.passed() >= kMinPassed || std::chrono::steady_clock::now() >= limit);
    const int number = enough.load() ? 255 : rounds % 255;
    job.send(0, filled(number), 1);
    EXPECT_EQ(job.recv(0, back, 1), 1);
    EXPECT_EQ(back, filled(number));
    ++rounds;
  }
  other.join();
  EXPECT_GE(job.passed(), kMinPassed) << "of " << rounds << " rounds";
  const Metrics metrics = job[0].metrics();
  EXPECT_EQ(metrics.completed_operations, static_cast<std::uint64_t>(2 * rounds));
  EXPECT_EQ(metrics.bytes, static_cast<std::uint64_t>(8 * rounds));
  // A message that took the long way cost rank 0 an offer or an answer.
  EXPECT_LE(metrics.control_messages_sent,
            static_cast<std::uint64_t>(4 * rounds - job.passed()) + 2);
}

// Several threads of two ranks exchange messages of all sizes in both directions. Each of them
// takes the way that chance gives it, and all of a tag match in the order of the calls.
TEST(QuickMessages, MessagesOfATagKeepTheirOrderWhicheverWayTheyTake) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    Job job(2);
    constexpr int kMessages = 300;
    const auto run = [&](int rank, Direction direction, std::int64_t tag) {
      // Both sides draw the same sizes, and each its own ways.
      std::mt19937 sizes(seed * 100 + static_cast<unsigned>(tag));
      std::mt19937 ways(seed * 1000 + static_cast<unsigned>(tag * 2 + rank));
      const bool sends = direction == Direction::kSend;
      std::vector<std::pair<Operation, std::unique_ptr<Bytes>>> open;
      std::vector<int> numbers;
      const auto check = [&](const Bytes& data, int number) {
        EXPECT_EQ(data, filled(number % 251, data.size())) << "message " << number;
      };
      const auto finish = [&] {
        for (std::size_t i = 0; i < open.size(); ++i) {
          open[i].first.wait();
          EXPECT_TRUE(open[i].first.status().ok()) << open[i].first.status().message;
          if (!sends) check(*open[i].second, numbers[i]);
        }
        open.clear();
        numbers.clear();
      };
      for (int number = 0; number < kMessages; ++number) {
        const std::size_t size = sizes() % 8 == 0 ? 40'000 : sizes() % 100;
        auto data = std::make_unique<Bytes>(sends ? filled(number % 251, size) : Bytes(size));
        const int peer = !sends && ways() % 2 == 0 ? kAnySource : 1 - rank;
        const Message message{
            .direction = direction, .tensor = view(*data), .peer = peer, .tag = tag};
        if (ways() % 4 == 0) {
          open.emplace_back(job.start(rank, message), std::move(data));
          numbers.push_back(number);
        } else {
          EXPECT_EQ(job.pass(rank, message) == 1 - rank || sends, true);
          if (!sends) check(*data, number);
        }
        if (ways() % 8 == 0) finish();
        if (ways() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      finish();
    };
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      for (const std::int64_t tag : {0, 1}) {
        threads.emplace_back(run, rank, Direction::kSend, rank * 2 + tag);
        threads.emplace_back(run, rank, Direction::kReceive, (1 - rank) * 2 + tag);
      }
    }
    threads.clear();  // joins
  }
}

TEST(QuickMessages, AMessageOfAnotherTagWaits) {
  Job job(2);
  for (int round = 0; round < 50; ++round) {
    std::jthread second([&] { job.send(1, filled(2), 0, 2); });
    std::jthread first([&] { job.send(1, filled(1), 0, 1); });
    Bytes data(8);
    job.recv(0, data, 1, 1);
    EXPECT_EQ(data, filled(1));
    job.recv(0, data, kAnySource, 2);
    EXPECT_EQ(data, filled(2));
  }
}

TEST(QuickMessages, ADisagreementIsAMismatchOnBothRanks) {
  Job job(2);
  for (int round = 0; round < 20; ++round) {
    std::jthread other([&] { EXPECT_THROW(job.send(1, filled(1, 8), 0), MismatchError); });
    Bytes data(9);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(job.recv(0, data, 1), MismatchError);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(1));
    EXPECT_EQ(data, filled(0, 9));
  }
  std::jthread other([&] { job.send(1, filled(3), 0); });
  Bytes data(8);
  job.recv(0, data, 1);
  EXPECT_EQ(data, filled(3));
}

// A recv that has stalled keeps its place: the send that would have matched it ends with its error,
// although another recv waits for a message at that time.
TEST(QuickMessages, TheSendOfAStalledRecvDoesNotReachALaterRecv) {
  runtime::RuntimeOptions options;
  options.stall_warning = milliseconds(100);
  options.stall_shutdown = milliseconds(300);
  Job job(2, options);
  Bytes data(8);
  EXPECT_THROW(job.recv(0, data, 1), StalledError);
  std::jthread other([&] {
    EXPECT_THROW(job.send(1, filled(1), 0), StalledError);
    job.send(1, filled(2), 0);
  });
  job.recv(0, data, 1);
  EXPECT_EQ(data, filled(2));
}

/// Whether a recv of rank 0 takes a message out of the box of rank 1.
bool takes_once(Job& job) {
  MessageBox box = job.box(1, 0);
  const Bytes sent = filled(9);
  box.post({.elements = 8, .dtype = static_cast<std::uint32_t>(DataType::kUInt8)}, sent);
  Bytes data(8);
  const Message recv{.direction = Direction::kReceive, .tensor = view(data), .peer = 1};
  const bool takes = job[0].pass_quickly(recv).has_value();
  EXPECT_EQ(data, filled(takes ? 9 : 0));
  EXPECT_EQ(box.retract(), !takes);
  return takes;
}

/// The same, in one of several tries: the engine thread may drive during some of them.
bool takes_from_box(Job& job) {
  for (int tries = 0; tries < 50; ++tries) {
    if (takes_once(job)) return true;
    if (tries % 10 == 9) std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

TEST(QuickMessages, ARecvTakesNoMessageOutOfTheBoxBeforeAnEarlierOne) {
  runtime::RuntimeOptions options;
  options.stall_warning = milliseconds(100);
  options.stall_shutdown = milliseconds(1500);
  Job job(2, options);
  if (!job.quick()) GTEST_SKIP() << "the ranks have no cores to wait on";
  EXPECT_TRUE(takes_from_box(job));

  Bytes offered = filled(1), data(8);
  const auto received = [&] { return job[0].metrics().control_messages_received; };
  const auto before = received();
  const Operation send =
      job.start(1, {.direction = Direction::kSend, .tensor = view(offered), .peer = 0});
  while (received() == before) job[0].step();
  EXPECT_FALSE(takes_from_box(job)) << "an offer waits";
  job.recv(0, data, 1);
  EXPECT_EQ(data, filled(1));
  send.wait();

  const Message early{.direction = Direction::kReceive, .tensor = view(data), .peer = 1};
  const Operation recv = job[0].submit(std::span(&early, 1), Progress::kCaller).front();
  EXPECT_FALSE(takes_from_box(job)) << "a recv is queued";
  {
    std::jthread other([&] { job.send(1, filled(2), 0); });
    recv.wait();
  }
  EXPECT_EQ(data, filled(2));

  EXPECT_THROW(job.recv(0, data, 1), StalledError);
  EXPECT_FALSE(takes_from_box(job)) << "the place of a recv remains";
}

TEST(QuickMessages, ARecvFromAnyRankReturnsTheSource) {
  Job job(3);
  for (int round = 0; round < 100; ++round) {
    std::jthread first([&] { job.send(1, filled(1), 0); });
    std::jthread second([&] { job.send(2, filled(2), 0); });
    int sum = 0;
    for (int i = 0; i < 2; ++i) {
      Bytes data(8);
      const int source = job.recv(0, data, kAnySource);
      EXPECT_EQ(data, filled(source));
      sum += source;
    }
    EXPECT_EQ(sum, 3);
  }
}

TEST(QuickMessages, WrongCallsHaveTheErrorsOfSlowOnes) {
  Job job(2);
  Bytes data(8);
  EXPECT_THROW(job.send(0, data, 0), UsageError);
  EXPECT_THROW(job.send(0, data, 2), UsageError);
  EXPECT_THROW(job.recv(0, data, -2), UsageError);
  EXPECT_THROW(job.pass(0, {.tensor = view(data), .peer = 1, .process_set = 5}), UsageError);
  TensorView none = view(data);
  none.data = nullptr;
  EXPECT_THROW(job.pass(0, {.tensor = none, .peer = 1}), UsageError);
  job[0].abort({StatusCode::kInternal, "the test ends the job", -1});
  EXPECT_THROW(job.send(0, data, 1), Error);
}

/// The control plane of a rank whose boxes this test has, without the runtime of the other rank.
class BoxOnly {
 public:
  BoxOnly() : network_(FakeNetwork::create(2, 7)), nodes_(join_nodes(2)) {
    for (int rank = 0; rank < 2; ++rank)
      planes_.push_back(message::make_control_plane(network_->carrier(rank),
                                                    nodes_[static_cast<std::size_t>(rank)]));
  }
  control::ControlPlane& operator[](std::size_t rank) { return *planes_[rank]; }

 private:
  std::shared_ptr<FakeNetwork> network_;
  std::vector<std::shared_ptr<host::Node>> nodes_;
  std::vector<std::unique_ptr<control::ControlPlane>> planes_;
};

Message message_to(int peer, Bytes& data) { return {.tensor = view(data), .peer = peer}; }

TEST(QuickMessages, ASendThatIsNotReceivedLeavesNothingInTheBox) {
  BoxOnly ranks;
  QuickMessages quick(ranks[0]);
  Bytes data = filled(1);
  EXPECT_FALSE(quick.send(message_to(1, data), [] { return true; }));
  EXPECT_FALSE(ranks[1].message_boxes(0)->incoming.full());
}

// The receiver has begun to read, so the message may reach it. The sender waits until it has, or is
// found to be lost.
TEST(QuickMessages, ASenderWhoseMessageIsBeingReadDrivesTheEngine) {
  for (const bool lost : {false, true}) {
    BoxOnly ranks;
    QuickMessages quick(ranks[0]);
    MessageBox box = ranks[1].message_boxes(0)->incoming;
    Bytes data = filled(1), received(8);
    const Message message = message_to(1, data);
    std::jthread receiver([&] {
      const auto dtype = static_cast<std::uint32_t>(DataType::kUInt8);
      while (box.begin({.elements = 8, .dtype = dtype}) != MessageBox::Found::kMessage) continue;
    });
    int steps = 0;
    const auto step = [&] {
      EXPECT_TRUE(quick.waits_for_reader());
      if (++steps < 3) return true;
      receiver.join();
      if (!lost) box.end(received);
      return !lost;
    };
    // The receiver may be too late.
    while (!quick.send(message, step) && steps == 0) continue;
    EXPECT_EQ(steps, 3);
    EXPECT_FALSE(quick.waits_for_reader());
    EXPECT_EQ(received, filled(lost ? 0 : 1));
  }
}

}  // namespace
}  // namespace hvd::testing
