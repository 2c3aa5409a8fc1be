// hvd::reconfigure() between processes that the tests fork and that no launcher has started.
#include "hvd/reconfigure.h"

#include <dirent.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "base/process_exit.h"
#include "elastic/forked_ranks.h"
#include "elastic/handles.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "public/reconfigure_handle.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using Handles = std::vector<std::string>;
using Clock = std::chrono::steady_clock;

Operation start_sum(std::vector<std::int64_t>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const TensorView view{.data = reinterpret_cast<std::byte*>(values.data()),
                        .count = count,
                        .dtype = DataType::kInt64,
                        .shape = {count}};
  return submit({.name = "sum", .parameters = Allreduce{}, .input = view, .output = view},
                Progress::kCaller);
}

std::int64_t sum(std::int64_t value, std::size_t elements = 1000) {
  std::vector<std::int64_t> values(elements, value);
  Operation operation = start_sum(values);
  operation.wait();
  operation.status().raise_if_error();
  EXPECT_EQ(std::ranges::count(values, values.front()), static_cast<std::ptrdiff_t>(elements));
  return values.front();
}

/// Checks this process's place, and that the ranks below `ranks` are in the job and no others.
void expect_job_of(int ranks, int own_rank) {
  EXPECT_EQ(size(), ranks);
  EXPECT_EQ(rank(), own_rank);
  EXPECT_EQ(sum(std::int64_t{1} << rank()), (std::int64_t{1} << ranks) - 1);
  EXPECT_EQ(sum(std::int64_t{1} << rank(), 300'000), (std::int64_t{1} << ranks) - 1);
}

int open_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  int found = 0;
  while (::readdir(folder) != nullptr) ++found;
  ::closedir(folder);
  return found;
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

TEST(Reconfigure, RanksFollowTheOrderOfTheHandles) {
  Blackboard board;
  ForkedRanks ranks(4, [&](int own) {
    Handles handles = exchange_handles(board, 0, own, {3, 1, 0, 2});
    reconfigure(1, handles, kLongTimeout);
    const int places[] = {2, 1, 3, 0};
    expect_job_of(4, places[own]);
    EXPECT_EQ(controller(), "ucx");
    handles = exchange_handles(board, 1, own, {0, 1, 2, 3});
    const auto mine = handles[static_cast<std::size_t>(own)];
    std::ranges::sort(handles);
    reconfigure(2, handles, kLongTimeout);
    expect_job_of(4, static_cast<int>(std::ranges::find(handles, mine) - handles.begin()));
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, SurvivorsOfAKillGoOn) {
  Blackboard board;
  ForkedRanks ranks(4, [&](int own) {
    reconfigure(10, exchange_handles(board, 0, own, {0, 1, 2, 3}), kLongTimeout);
    expect_job_of(4, own);
    meet(board, 1, own, {0, 1, 2, 3});
    if (own == 2) ::pause();
    EXPECT_THROW(for (;;) sum(1), PeerLostError);
    EXPECT_THROW(sum(1), PeerLostError);
    reconfigure(11, exchange_handles(board, 2, own, {0, 1, 3}), kLongTimeout);
    expect_job_of(3, own == 3 ? 2 : own);
    shutdown();
  });
  for (const int process : {0, 1, 2, 3}) board.read(1, process);
  ranks.kill(2);
  EXPECT_EQ(ranks.wait(2), 128 + SIGKILL);
  ranks.expect_all_succeed();
}

TEST(Reconfigure, GrowsShrinksMergesAndSplits) {
  Blackboard board;
  const std::vector<int> all{0, 1, 2};
  ForkedRanks ranks(3, [&](int own) {
    // Two jobs side by side, then one, then one without the live rank 1, then jobs of one.
    const auto handles = exchange_handles(board, 0, own, all);
    if (own == 0) reconfigure(20, {handles[0]}, kLongTimeout);
    if (own > 0) reconfigure(21, {handles[1], handles[2]}, kLongTimeout);
    expect_job_of(own == 0 ? 1 : 2, own == 2 ? 1 : 0);
    reconfigure(22, exchange_handles(board, 1, own, all), kLongTimeout);
    expect_job_of(3, own);
    meet(board, 2, own, all);
    if (own != 1) {
      reconfigure(23, exchange_handles(board, 3, own, {0, 2}), kLongTimeout);
      expect_job_of(2, own / 2);
    } else {
      EXPECT_THROW(for (;;) sum(1), ShutdownError);
    }
    meet(board, 4, own, all);
    // The process that was left out joins again, and every process alone after that.
    reconfigure(24, exchange_handles(board, 5, own, all), kLongTimeout);
    expect_job_of(3, own);
    meet(board, 6, own, all);  // a rank that leaves ends the operations of the others
    reconfigure(30 + own, {reconfigure_handle()}, kLongTimeout);
    expect_job_of(1, 0);
    EXPECT_EQ(controller(), "local");
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, AUuidServesOnce) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    reconfigure(40, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    const auto handles = exchange_handles(board, 1, own, {0, 1});
    try {
      reconfigure(40, handles, kLongTimeout);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("already used"));
    }
    expect_job_of(2, own);  // the job goes on
    reconfigure(41, handles, kLongTimeout);
    expect_job_of(2, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, AMissingMemberIsNamedAndTheJobGoesOn) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    reconfigure(50, exchange_handles(board, 0, own, {0, 1, 2}), kLongTimeout);
    const auto handles = exchange_handles(board, 1, own, {0, 1, 2});
    if (own != 2) {
      const std::string error = error_of(51, handles, kShortTimeout, /*expected_rank=*/2);
      const auto missing = runtime::decode_reconfigure_handle(handles[2]);
      EXPECT_THAT(error, HasSubstr("reconfigure 51: rank 2 of 3 (host "));
      EXPECT_THAT(error, HasSubstr("process " + std::to_string(missing.value().process.pid)));
    }
    meet(board, 2, own, {0, 1, 2});
    expect_job_of(3, own);
    // Members with different uuids or lists do not find each other.
    const auto others = exchange_handles(board, 3, own, {0, 1, 2});
    if (own < 2)
      EXPECT_THAT(error_of(60 + own, {others[0], others[1]}, kShortTimeout, 1 - own),
                  HasSubstr("rank"));
    meet(board, 4, own, {0, 1, 2});
    expect_job_of(3, own);
    reconfigure(70, exchange_handles(board, 5, own, {0, 1, 2}), kLongTimeout);
    expect_job_of(3, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, ADeadMemberIsNamedAtOnce) {
  for (const int dead : {0, 1, 2}) {
    SCOPED_TRACE(dead);
    Blackboard board;
    ForkedRanks ranks(3, [&](int own) {
      const auto handles = exchange_handles(board, 0, own, {0, 1, 2});
      meet(board, 1, own, {0, 1, 2});
      if (own == dead) ::pause();
      board.read(2, dead);
      std::string error;
      const double lasted = seconds_of([&] { error = error_of(80, handles, kLongTimeout, dead); });
      EXPECT_LT(lasted, 10);
      EXPECT_THAT(error, HasSubstr("rank " + std::to_string(dead) + " of 3 (host "));
      EXPECT_FALSE(is_initialized());
      std::vector<int> left{0, 1, 2};
      std::erase(left, dead);
      reconfigure(81, exchange_handles(board, 3, own, left), kLongTimeout);
      expect_job_of(2, own == left[0] ? 0 : 1);
      shutdown();
    });
    board.read(1, dead);
    ranks.kill(dead);
    EXPECT_EQ(ranks.wait(dead), 128 + SIGKILL);
    board.post(2, dead);
    ranks.expect_all_succeed();
  }
}

TEST(Reconfigure, AMemberThatDiesWhileTheOthersWaitIsNamed) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    const auto handles = exchange_handles(board, 0, own, {0, 1, 2});
    if (own == 1) ::pause();
    board.post(1, own);
    EXPECT_THAT(error_of(90, handles, kLongTimeout, 1), HasSubstr("rank 1 of 3 (host "));
    meet(board, 2, own, {0, 2});  // a process that ends would be found, too
  });
  board.read(1, 0);
  board.read(1, 2);
  std::this_thread::sleep_for(milliseconds(300));
  ranks.kill(1);
  EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
  ranks.expect_all_succeed();
}

TEST(Reconfigure, OperationsOfTheFormerJobEnd) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    reconfigure(100, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    const ProcessSet set = add_process_set({0, 1});
    std::vector<std::int64_t> values(1000);
    std::jthread waiter;
    if (own == 0) {
      waiter = std::jthread([operation = start_sum(values)] {  // rank 1 does not take part
        try {
          operation.wait();
          operation.status().raise_if_error();
          ADD_FAILURE() << "no error";
        } catch (const ShutdownError& error) {
          EXPECT_THAT(error.what(), HasSubstr("hvd::reconfigure()"));
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    reconfigure(101, exchange_handles(board, 1, own, {0, 1}), kLongTimeout);
    if (waiter.joinable()) waiter.join();
    EXPECT_THROW(barrier(set), UsageError);
    expect_job_of(2, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

// Memory of an operation that was cut off is kept while a process that is left out may read it.
TEST(Reconfigure, KeepsMemoryUntilTheOthersHaveLeftOrEnded) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    reconfigure(110, exchange_handles(board, 0, own, {0, 1, 2}), kLongTimeout);
    std::weak_ptr<std::vector<std::int64_t>> memory;
    if (own != 2) {
      const auto values = std::make_shared<std::vector<std::int64_t>>(1000);
      memory = values;
      keep_until_exit(values);  // as an operation does that is cut off
    }
    meet(board, 1, own, {0, 1, 2});
    if (own == 2) ::pause();
    reconfigure(111, exchange_handles(board, 2, own, {0, 1}), kLongTimeout);
    EXPECT_FALSE(memory.expired()) << "rank 2 runs";
    board.post(3, own);
    board.read(4, 2);
    reconfigure(112, exchange_handles(board, 5, own, {0, 1}), kLongTimeout);
    EXPECT_TRUE(memory.expired()) << "rank 2 has ended";
    expect_job_of(2, own);
    shutdown();
  });
  board.read(3, 0);
  board.read(3, 1);
  ranks.kill(2);
  EXPECT_EQ(ranks.wait(2), 128 + SIGKILL);
  board.post(4, 2);
  ranks.expect_all_succeed();
}

TEST(Reconfigure, AJobOfInitCanBeReplaced) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    init();  // each process alone
    expect_job_of(1, 0);
    EXPECT_THROW(reconfigure(120, {reconfigure_handle()}, {.world_size = 1}), UsageError);
    reconfigure(120, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    expect_job_of(2, own);
    EXPECT_THROW(init(), UsageError);
    shutdown();
    EXPECT_FALSE(is_initialized());
    reconfigure(121, exchange_handles(board, 1, own, {1, 0}), kLongTimeout);
    expect_job_of(2, 1 - own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

// Process 0 waits at process 1 as rank 1, and so does process 2 in another call.
TEST(Reconfigure, AnotherCallAtTheSameServerGoesOn) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    const auto handles = exchange_handles(board, 0, own, {0, 1, 2});
    if (own == 0) {
      board.post(1, own);
      EXPECT_THAT(error_of(130, {handles[1], handles[0]}, kLongTimeout, /*expected_rank=*/-1),
                  HasSubstr("has given up this call, or its handle is used up"));
    } else {
      board.read(1, 0);
      std::this_thread::sleep_for(milliseconds(300));
      reconfigure(131, {handles[1], handles[2]}, kLongTimeout);
      expect_job_of(2, own - 1);
    }
    meet(board, 2, own, {0, 1, 2});
    reconfigure(132, exchange_handles(board, 3, own, {0, 1, 2}), kLongTimeout);
    expect_job_of(3, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, ProcessesOfSeveralRunsOfALauncherFormAJob) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    ::setenv("TORCHELASTIC_RUN_ID", own == 0 ? "first" : "second", 1);
    EXPECT_FALSE(has_reconfigured());
    reconfigure(140, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    EXPECT_TRUE(has_reconfigured());
    expect_job_of(2, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, ACallbackMustNotCallIt) {
  ForkedRanks ranks(1, [&](int) {
    reconfigure(150, {reconfigure_handle()});
    std::string error;
    Operation operation = submit({.name = "callback",
                                  .parameters = Barrier{},
                                  .on_done =
                                      [&](const Status&, const EventPtr&) {
                                        try {
                                          reconfigure(151, {""});
                                        } catch (const UsageError& usage) {
                                          error = usage.what();
                                        }
                                      }},
                                 Progress::kCaller);
    operation.wait();
    EXPECT_THAT(error, HasSubstr("called in a callback of an operation"));
    expect_job_of(1, 0);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, AFailureAfterTheArrivalsLeavesNoJob) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    reconfigure(160, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    expect_job_of(2, own);
    ::setenv("HVD_CACHE_CAPACITY", own == 0 ? "16" : "32", 1);
    try {
      reconfigure(161, exchange_handles(board, 1, own, {0, 1}), kLongTimeout);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("hvd::reconfigure 161: "));
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("hvd::init")));
    }
    EXPECT_FALSE(is_initialized());
    try {
      rank();
      ADD_FAILURE() << "no error";
    } catch (const NotInitializedError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the last hvd::reconfigure() failed"));
    }
    ::unsetenv("HVD_CACHE_CAPACITY");
    reconfigure(162, exchange_handles(board, 2, own, {0, 1}), kLongTimeout);
    expect_job_of(2, own);
    shutdown();
  });
  ranks.expect_all_succeed();
}

// Members of a job that has failed may still use memory, also after init() has joined another one.
TEST(Reconfigure, KeepsMemoryOfJobsBeforeTheLast) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    reconfigure(170, exchange_handles(board, 0, own, {0, 1}), kLongTimeout);
    meet(board, 1, own, {0, 1});
    if (own == 1) ::pause();
    const auto values = std::make_shared<std::vector<std::int64_t>>(1000);
    const std::weak_ptr<std::vector<std::int64_t>> memory = values;
    keep_until_exit(values);
    fail("a test");
    shutdown();
    init();  // alone
    reconfigure(171, {reconfigure_handle()}, kLongTimeout);
    EXPECT_GT(memory.use_count(), 1) << "rank 1 runs";
    shutdown();
  });
  EXPECT_EQ(ranks.wait(0), 0);
  ranks.kill(1);
  EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
}

TEST(Reconfigure, EightProcessesFiftyTimesKeepNothing) {
  constexpr int kTimes = 50;
  Blackboard board;
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  ForkedRanks ranks(8, [&](int own) {
    int settled = 0;
    for (int time = 0; time < kTimes; ++time) {
      reconfigure(200 + time, exchange_handles(board, time, own, all), kLongTimeout);
      expect_job_of(8, own);
      if (time == 4) settled = open_descriptors();
    }
    EXPECT_LE(open_descriptors(), settled + 8);
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(Reconfigure, WrongArgumentsAreUsageErrors) {
  ForkedRanks ranks(1, [&](int) {
    const std::string own = reconfigure_handle();
    EXPECT_EQ(own, reconfigure_handle());
    EXPECT_THROW(reconfigure(1, {}), UsageError);
    EXPECT_THROW(reconfigure(1, {own, own}), UsageError);
    EXPECT_THROW(reconfigure(1, {"gloo:0:1"}), UsageError);
    EXPECT_THROW(reconfigure(1, {own + " ", own}), UsageError);
    EXPECT_THROW(reconfigure(1, {own}, {.init_method = "env://"}), UsageError);
    reconfigure(1, {own});
    EXPECT_NE(own, reconfigure_handle());
    EXPECT_THROW(reconfigure(2, {own}), UsageError) << "it is used up";
    shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(ReconfigureHandle, IsAText) {
  const runtime::ReconfigureHandle handle{
      .address = {.host = "boot/net:[4026531840]",
                  .port = 4711,
                  .addresses = {"10.0.0.1", "fd00::1"}},
      .process = {.host = "node7", .boot = "b0", .pid = 12, .start_time = 34, .pid_namespace = 56},
      .id = "0123"};
  const std::string encoded = runtime::encode(handle);
  const auto decoded = runtime::decode_reconfigure_handle(encoded);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(runtime::encode(*decoded), encoded);
  EXPECT_EQ(decoded->process.pid, 12);
  EXPECT_EQ(decoded->address.addresses.size(), 2U);
  for (std::size_t length = 0; length < encoded.size(); ++length) {
    const auto part = runtime::decode_reconfigure_handle(encoded.substr(0, length));
    if (part) EXPECT_EQ(runtime::encode(*part), encoded.substr(0, length));
  }
  EXPECT_FALSE(runtime::decode_reconfigure_handle("hvd2" + encoded.substr(4)));
  EXPECT_FALSE(runtime::decode_reconfigure_handle(encoded + std::string(4000, 'a')));
  EXPECT_FALSE(runtime::decode_reconfigure_handle("hvd1 b node\n 1 2 3 id host 1"));
  const auto unknown = runtime::decode_reconfigure_handle(
      runtime::encode({.address = {.host = "?", .port = 1}, .id = "x"}));
  ASSERT_TRUE(unknown) << "a system without a boot id";
  EXPECT_TRUE(unknown->process.boot.empty());
}

}  // namespace
}  // namespace hvd::testing
