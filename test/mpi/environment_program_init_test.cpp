#include <gtest/gtest.h>
#include <mpi.h>

#include "hvd/error.h"
#include "support/watchdog.h"
#include "transport/mpi/environment.h"
#include "transport/mpi/mpi_world.h"

// The program starts MPI with less than MPI_THREAD_MULTIPLE and ends it itself.

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;

TEST(EnvironmentProgramInit, JoinsWithALowerThreadLevelAndLogsIt) {
  MPI_Init(nullptr, nullptr);
  ::testing::internal::CaptureStderr();
  for (int job = 0; job < 2; ++job) {
    const auto world = MpiWorld::join({.start_timeout = 30s});
    EXPECT_FALSE(initialized_by_hvd());
    EXPECT_FALSE(threads_multiple());
    world->farewell();
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::size_t warning =
      log.find(std::string(thread_level_name()) + ", not MPI_THREAD_MULTIPLE");
  EXPECT_NE(warning, std::string::npos) << log;
  EXPECT_EQ(log.find("not MPI_THREAD_MULTIPLE", warning + 40), std::string::npos)
      << "once is enough: " << log;
  EXPECT_TRUE(is_active());
}

TEST(EnvironmentProgramInit, CannotStartAfterTheProgramsFinalize) {
  MPI_Finalize();
  EXPECT_FALSE(is_active());
  EXPECT_THROW(MpiWorld::join({.start_timeout = 1s}), UsageError);
}

}  // namespace
}  // namespace hvd::mpi
