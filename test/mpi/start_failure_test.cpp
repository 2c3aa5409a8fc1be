#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/mpi_module.h"
#include "bootstrap/world.h"
#include "hvd/error.h"
#include "mpi/support/mpi_test.h"
#include "transport/mpi/environment.h"

// A rank fails between joining a job over MPI and the job's beginning.

namespace hvd::runtime {
namespace {

using namespace std::chrono_literals;
using hvd::testing::mpi_rank;
using hvd::testing::mpi_size;
using ::testing::HasSubstr;

std::shared_ptr<MpiJob> join() { return hvd_mpi_module_entry.module()->join(30s, 10s); }

void expect_exchange(MpiJob& world, int offset) {
  const int own = mpi_rank() + offset;
  std::vector<int> all(static_cast<std::size_t>(mpi_size()), -1);
  world.allgather(&own, all.data(), sizeof own);
  std::vector<int> expected(all.size());
  std::iota(expected.begin(), expected.end(), offset);
  EXPECT_EQ(all, expected);
}

/// Leaves a job that has begun.
void leave(World& world) {
  world.node()->control_segment().farewell();
  world.carrier()->farewell();
}

/// A job that begins after all: MPI is still usable, and no message of the failed start is left.
void expect_a_job_begins() {
  const auto world = join();
  expect_exchange(*world, 100);
  expect_exchange(*world, 200);
  world->begun();
  leave(*world);
  EXPECT_FALSE(mpi::has_failed()) << "all ranks have left in order, so MPI can be finalised";
}

/// Runs `step` and expects the reason of the rank that has failed, long before the deadline.
void expect_reason(int failed, const std::string& reason, const std::function<void()>& step) {
  const auto start = std::chrono::steady_clock::now();
  try {
    step();
    ADD_FAILURE() << "no error on rank " << mpi_rank();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("hvd::init: rank " + std::to_string(failed) + " ("));
    EXPECT_THAT(error.what(), HasSubstr(") could not begin: " + reason));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
}

/// One rank fails after `exchanges` exchanges; the others go on until an error.
void fail_after(int exchanges, int failed, std::chrono::milliseconds delay = 0ms) {
  const auto world = join();
  for (int i = 0; i < exchanges; ++i) expect_exchange(*world, i);
  if (mpi_rank() == failed) {
    std::this_thread::sleep_for(delay);
    world->abandon(Error("no memory left"));
    world->abandon(Error("a second call has no effect"));
    return;
  }
  expect_reason(failed, "no memory left", [&] {
    for (int i = exchanges; i < 2; ++i) expect_exchange(*world, i);
    world->begun();
  });
  world->abandon(Error("because another rank has failed"));
}

TEST(StartFailure, AJobBegins) { expect_a_job_begins(); }

TEST(StartFailure, EveryOtherRankGetsTheReasonOfTheRankThatFails) {
  for (int exchanges = 0; exchanges <= 2; ++exchanges)
    for (int failed = 0; failed < mpi_size(); ++failed) fail_after(exchanges, failed);
  expect_a_job_begins();
}

TEST(StartFailure, RanksThatWaitInAnExchangeGetTheReasonToo) {
  fail_after(1, mpi_size() - 1, 300ms);
  expect_a_job_begins();
}

TEST(StartFailure, RanksThatAreLateGetTheReasonToo) {
  const auto world = join();
  if (mpi_rank() == 0) {
    world->abandon(Error("no GPU"));
  } else {
    std::this_thread::sleep_for(300ms);
    expect_reason(0, "no GPU", [&] { world->begun(); });
  }
  expect_a_job_begins();
}

TEST(StartFailure, ALongReasonIsCutOff) {
  const auto world = join();
  if (mpi_rank() == 0) {
    world->abandon(Error(std::string(2000, 'x')));
  } else {
    expect_reason(0, std::string(500, 'x'), [&] { world->begun(); });
  }
  expect_a_job_begins();
}

TEST(StartFailure, SeveralRanksMayFailAtOnce) {
  const auto world = join();
  if (mpi_rank() < 2) {
    world->abandon(Error("rank " + std::to_string(mpi_rank()) + " is broken"));
  } else {
    expect_reason(0, "rank 0 is broken", [&] { expect_exchange(*world, 0); });
  }
  expect_a_job_begins();
}

TEST(StartFailure, AllRanksMayFailTogether) {
  const auto world = join();
  expect_exchange(*world, 0);
  world->abandon(Error("the settings differ"));
  expect_a_job_begins();
}

TEST(StartFailure, ARankThatHasBegunDoesNotVote) {
  const auto world = join();
  world->begun();
  world->abandon(Error("too late"));
  leave(*world);
  expect_a_job_begins();
}

}  // namespace
}  // namespace hvd::runtime
