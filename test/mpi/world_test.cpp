#include "transport/mpi/mpi_world.h"

#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/statvfs.h>

#include <cstdint>
#include <cstdlib>

#include "base/shared_segment.h"
#include "hvd/error.h"
#include "mpi/support/mpi_test.h"
#include "transport/mpi/call_watch.h"
#include "transport/mpi/communicator.h"

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;
using testing::mpi_rank;
using testing::mpi_size;

TEST(MpiWorld, AgreesWithMpi) {
  const auto world = MpiWorld::join({.start_timeout = 30s});
  EXPECT_EQ(world->topology().rank, mpi_rank());
  EXPECT_EQ(world->topology().size, mpi_size());
  EXPECT_EQ(world->topology().local_size, mpi_size());
  EXPECT_TRUE(world->node()->control_segment_shared());
  EXPECT_TRUE(world->node()->rung_by_all());
  testing::mpi_barrier();
  EXPECT_TRUE(testing::shared_memory_left_behind(world->node()->name_prefix()).empty())
      << "the segment's name must be removed as soon as all have mapped it";
  testing::mpi_barrier();
  world->farewell();
}

TEST(MpiWorld, SegmentsMayTakeMoreThanDevShmHoldsWhereTheyDoWithoutIt) {
  if (!SharedSegment::needs_no_room()) GTEST_SKIP() << "this system has no memfd_create()";
  struct statvfs info = {};
  ASSERT_EQ(::statvfs("/dev/shm", &info), 0);
  const auto world = MpiWorld::join({.start_timeout = 30s});
  for (int rank = 0; rank < mpi_size(); ++rank)
    EXPECT_GT(world->node()->shared_memory_free(rank),
              std::uint64_t{info.f_blocks} * info.f_frsize);
  world->farewell();
}

TEST(MpiWorld, SeparatesHostsThatATestInvents) {
  std::string hosts;
  for (int rank = 0; rank < mpi_size(); ++rank) hosts += rank % 2 == 0 ? "even," : "odd,";
  hosts.pop_back();
  setenv("HVD_TEST_HOSTS", hosts.c_str(), 1);
  const auto world = MpiWorld::join({.start_timeout = 30s});
  unsetenv("HVD_TEST_HOSTS");
  EXPECT_EQ(world->topology().local_rank, mpi_rank() / 2);
  EXPECT_EQ(world->topology().local_size, (mpi_size() + 1 - mpi_rank() % 2) / 2);
  EXPECT_EQ(world->node()->rung_by_all(), mpi_size() == 1);
  EXPECT_TRUE(world->node()->control_segment_shared());
  EXPECT_TRUE(world->node()->all_control_segments_shared());
  for (int rank = 0; rank < mpi_size(); ++rank)
    EXPECT_GT(world->node()->shared_memory_free(rank), 0U);
  world->farewell();
}

TEST(MpiWorld, AllRanksKnowThatOneHostSharesNoMemory) {
  if (mpi_size() < 3) GTEST_SKIP() << "needs a host of two ranks and another";
  std::string hosts = "pair,pair";
  for (int rank = 2; rank < mpi_size(); ++rank) hosts += ",other" + std::to_string(rank);
  setenv("HVD_TEST_HOSTS", hosts.c_str(), 1);
  const auto world = MpiWorld::join({.start_timeout = 30s, .control_segment = mpi_rank() != 1});
  unsetenv("HVD_TEST_HOSTS");
  EXPECT_FALSE(world->node()->all_control_segments_shared());
  EXPECT_EQ(world->node()->control_segment_shared(), mpi_rank() >= 2);
  world->farewell();
}

TEST(MpiWorld, RefusesAMalformedHostList) {
  setenv("HVD_TEST_HOSTS", "a,b,c,d,e,f,g", 1);
  EXPECT_THROW(MpiWorld::join({.start_timeout = 30s}), UsageError);
  unsetenv("HVD_TEST_HOSTS");
}

TEST(MpiWorld, WorksWithoutSharedMemory) {
  const auto world = MpiWorld::join({.start_timeout = 30s, .control_segment = false});
  EXPECT_EQ(world->node()->rung_by_all(), mpi_size() == 1);
  EXPECT_EQ(world->node()->all_control_segments_shared(), mpi_size() == 1);
  const std::uint32_t before = world->node()->control_segment().own_doorbell().ticket();
  world->node()->ring(mpi_rank());
  EXPECT_NE(world->node()->control_segment().own_doorbell().ticket(), before)
      << "a rank can always ring itself";
  world->farewell();
}

TEST(MpiWorld, OneRankWithoutSharedMemoryMakesItsHostPoll) {
  const auto world =
      MpiWorld::join({.start_timeout = 30s, .control_segment = mpi_rank() != mpi_size() - 1});
  EXPECT_EQ(world->node()->control_segment_shared(), mpi_size() == 1);
  testing::mpi_barrier();
  EXPECT_TRUE(testing::shared_memory_left_behind(world->node()->name_prefix()).empty());
  testing::mpi_barrier();
  world->farewell();
}

TEST(MpiError, NamesCallPeerAndReason) {
  // MPICH 5.0.2 takes the ABI's class for one of its own: "Other MPI error".
  char reason[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  MPI_Error_string(MPI_ERR_TRUNCATE, reason, &length);
  ASSERT_GT(length, 0);
  try {
    check(MPI_ERR_TRUNCATE, "MPI_Irecv", 3);
    FAIL() << "no throw";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(std::string("MPI_Irecv with rank 3 failed: ") + reason), std::string::npos)
        << text;
  }
  EXPECT_NO_THROW(check(MPI_SUCCESS, "MPI_Irecv"));
}

}  // namespace
}  // namespace hvd::mpi
