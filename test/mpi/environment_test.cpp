#include "transport/mpi/environment.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>

#include "transport/mpi/communicator.h"
#include "transport/mpi/mpi_world.h"

// hvd starts MPI here, and ends it when the process exits: mpirun reports a rank that exits without
// MPI_Finalize as a failure.

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;

TEST(Environment, StartsMpiOnceForSeveralJobs) {
  EXPECT_FALSE(is_active());
  EXPECT_FALSE(threads_multiple());
  for (int job = 0; job < 5; ++job) {
    const auto world = MpiWorld::join({.start_timeout = 30s});
    EXPECT_TRUE(initialized_by_hvd());
    EXPECT_TRUE(is_active());
    EXPECT_TRUE(threads_multiple());
    EXPECT_EQ(world->control_communicator().size(), world->topology().size);
    EXPECT_EQ(world->control_communicator().rank(), world->topology().rank);
    world->farewell();
  }
  EXPECT_TRUE(is_active()) << "leaving a job must not end MPI, which cannot start again";
  EXPECT_FALSE(has_failed());
}

TEST(Environment, SetsVariablesThatTheUserHasNotSet) {
  ensure_initialized();
  ASSERT_NE(std::getenv("OMPI_MCA_btl_vader_single_copy_mechanism"), nullptr);
  EXPECT_STREQ(std::getenv("OMPI_MCA_btl_vader_single_copy_mechanism"), "none");
  EXPECT_STREQ(std::getenv("OMPI_MCA_mpi_yield_when_idle"), "1");
}

TEST(Environment, NamesTheLibrary) {
  EXPECT_FALSE(library_version().empty());
  EXPECT_EQ(library_version().find('\n'), std::string::npos);
}

TEST(Environment, KeepsTheProgramsErrorHandler) {
  const auto world = MpiWorld::join({.start_timeout = 30s});
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  EXPECT_EQ(handler, MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
  MPI_Comm_get_errhandler(world->data_communicator().get(), &handler);
  EXPECT_EQ(handler, MPI_ERRORS_RETURN);
  MPI_Errhandler_free(&handler);
  world->farewell();
}

}  // namespace
}  // namespace hvd::mpi
