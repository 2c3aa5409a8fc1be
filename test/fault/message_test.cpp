// Tests send and recv in a real job. ctest runs it over MPI and UCX with several numbers of ranks.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <hvd/point_to_point.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/float_operation.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;

TensorView view(Floats& data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {reinterpret_cast<std::byte*>(data.data()), count, DataType::kFloat32, {}, {count}};
}

Floats numbers(std::size_t count, int first) {
  Floats data(count);
  std::iota(data.begin(), data.end(), static_cast<float>(first));
  return data;
}

int next() { return (rank() + 1) % size(); }
int previous() { return (rank() + size() - 1) % size(); }

void wait_for_all(const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) operation.wait();
  for (const Operation& operation : operations)
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

float sum(float value, const std::string& name) {
  Floats data(100, value);
  const Operation operation = submit(float_operation(data, name), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  return data.back();
}

TEST(Message, CallsBeforeInitFail) {
  Floats data(1);
  EXPECT_THROW(send(view(data), 1), NotInitializedError);
}

TEST(Message, ARingMovesEverySize) {
  init();
  for (const std::size_t count : {0, 1, 2048, 2049, 65537, 3'000'001}) {
    Floats sent = numbers(count, rank());
    Floats received(count);
    const Operation recv = irecv(view(received), previous());
    send(view(sent), next());
    recv.wait();
    ASSERT_TRUE(recv.status().ok()) << recv.status().message;
    EXPECT_EQ(recv.result(), previous());
    EXPECT_EQ(received, numbers(count, previous())) << count;
  }
  shutdown();
}

TEST(Message, APingPongReturns) {
  init();
  Floats data(1);
  for (int i = 0; i < 1000 && rank() < 2; ++i) {
    data[0] = static_cast<float>(i);
    if (rank() == 0) send(view(data), 1);
    EXPECT_EQ(recv(view(data), 1 - rank()), 1 - rank());
    EXPECT_EQ(data[0], static_cast<float>(i));
    if (rank() == 1) send(view(data), 0);
  }
  barrier();
  shutdown();
}

// Each pair of ranks exchanges messages of random sizes in a random order, while allreduces go on.
TEST(Message, AllPairsExchangeMessagesInAnyOrderBesideCollectives) {
  init();
  constexpr int kMessages = 12;
  struct Exchange {
    Floats data;
    int peer;
    std::int64_t tag;
    bool sends;
  };
  const auto size_of = [](int from, int to, int tag) {
    std::mt19937 random(static_cast<unsigned>(from * 10007 + to * 101 + tag));
    return std::size_t{random() % 3 == 0 ? random() % 400'000 : random() % 3000};
  };
  std::vector<Exchange> exchanges;
  for (int peer = 0; peer < size(); ++peer) {
    for (int tag = 0; tag < kMessages && peer != rank(); ++tag) {
      exchanges.push_back({numbers(size_of(rank(), peer, tag), rank() + tag), peer, tag, true});
      exchanges.push_back({Floats(size_of(peer, rank(), tag)), peer, tag, false});
    }
  }
  std::mt19937 random(static_cast<unsigned>(rank()));
  std::shuffle(exchanges.begin(), exchanges.end(), random);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < exchanges.size(); ++i) {
    Exchange& each = exchanges[i];
    operations.push_back(each.sends ? isend(view(each.data), each.peer, {.tag = each.tag})
                                    : irecv(view(each.data), each.peer, {.tag = each.tag}));
  }
  for (int step = 0; step < 20; ++step)
    EXPECT_EQ(sum(static_cast<float>(rank()), "beside"),
              static_cast<float>(size() * (size() - 1) / 2));
  wait_for_all(operations);
  for (const Exchange& each : exchanges) {
    if (each.sends) continue;
    EXPECT_EQ(each.data, numbers(each.data.size(), each.peer + static_cast<int>(each.tag)));
  }
  barrier();
  shutdown();
}

TEST(Message, NamesAndSetsAndAnySource) {
  init();
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  const ProcessSet set = add_process_set(all);
  if (rank() == 0) {
    std::vector<int> sources;
    for (int i = 1; i < size(); ++i) {
      Floats data(100);
      const int source = recv(view(data), kAnySource, {.name = "part", .process_set = set});
      EXPECT_EQ(data, numbers(100, source));
      sources.push_back(source);
    }
    std::sort(sources.begin(), sources.end());
    EXPECT_EQ(sources, std::vector<int>(all.begin() + 1, all.end()));
  } else {
    Floats data = numbers(100, rank());
    send(view(data), 0, {.name = "part", .process_set = set});
  }
  shutdown();
}

TEST(Message, SeveralThreadsSendAndReceive) {
  init();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (int i = 0; i < 50; ++i) {
        Floats sent = numbers(i % 10 == 0 ? 50'000 : 10, i);
        Floats received(sent.size());
        const Operation recv = irecv(view(received), previous(), {.tag = thread});
        send(view(sent), next(), {.tag = thread});
        recv.wait();
        EXPECT_EQ(received, sent);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  barrier();
  shutdown();
}

TEST(Message, ADisagreementIsAMismatchOnBothRanksWithinASecond) {
  init();
  barrier();
  const auto begin = std::chrono::steady_clock::now();
  Floats data(rank() == 0 ? 30'000 : 30'001);
  if (rank() == 0) {
    EXPECT_THROW(send(view(data), 1), MismatchError);
  }
  if (rank() == 1) {
    EXPECT_THROW(recv(view(data), 0), MismatchError);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(sum(1, "after"), static_cast<float>(size()));
  shutdown();
}

TEST(Message, ARecvWithoutASendStalls) {
  init({.stall_warning = std::chrono::milliseconds(200),
        .stall_shutdown = std::chrono::milliseconds(1000)});
  Floats data(10);
  if (rank() == 0) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      recv(view(data), 1, {.tag = 7});
      ADD_FAILURE() << "nothing was sent";
    } catch (const StalledError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 "), std::string::npos) << error.what();
    }
    const auto waited = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(waited, std::chrono::milliseconds(1000));
    EXPECT_LT(waited, std::chrono::milliseconds(2000));
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(1600));
  }
  if (rank() == 1) {
    EXPECT_THROW(send(view(data), 0, {.tag = 7}), StalledError);
  }
  barrier();
  shutdown();
}

TEST(Message, ShutdownEndsWhatIsOutstanding) {
  init();
  Floats data(10);
  const Operation recv = irecv(view(data), next(), {.tag = 9});
  shutdown();
  ASSERT_TRUE(recv.done());
  EXPECT_EQ(recv.status().code, StatusCode::kShutdown);
}

// A thousand steps of a pipeline: messages beside a replayed schedule do not end the replay.
TEST(Message, StepsWithMessagesNegotiateNothing) {
  init();
  Floats sent = numbers(20'000, rank());
  Floats received(20'000);
  Floats gradient(1000, 1);
  const auto step = [&] {
    const Operation recv = irecv(view(received), previous());
    const Operation reduced = submit(float_operation(gradient, "gradient"));
    send(view(sent), next());
    recv.wait();
    reduced.wait();
    gradient.assign(1000, 1);
  };
  for (int i = 0; i < 30; ++i) step();
  barrier();
  for (int i = 0; i < 30; ++i) step();
  const Metrics before = metrics();
  for (int i = 0; i < 300; ++i) step();
  const Metrics after = metrics();
  EXPECT_EQ(after.negotiated_operations, before.negotiated_operations);
  EXPECT_EQ(after.locked_operations - before.locked_operations, 300u);
  barrier();
  shutdown();
}

}  // namespace
}  // namespace hvd::testing
