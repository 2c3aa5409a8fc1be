#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <memory>

#include "support/failure_printer.h"
#include "support/watchdog.h"

// The main() of tests that run under mpirun: the program, not hvd, starts and ends MPI.

namespace {

/// Makes a test fail on every rank if it has failed on one.
class FailTogether final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailTogether(int rank) : rank_(rank) {}

  void OnTestEnd(const ::testing::TestInfo& info) override {
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int own = info.result()->Failed() ? rank_ : size;
    int first = size;
    MPI_Allreduce(&own, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first < size && own == size) ADD_FAILURE() << "the test failed on rank " << first;
  }

 private:
  int rank_;
};

}  // namespace

int main(int argc, char** argv) {
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", /*overwrite=*/0);
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);

  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  // OnTestEnd is called in reverse order, so the printer, which comes first, sees the failures that
  // are added here.
  if (rank != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(std::make_unique<hvd::testing::FailurePrinter>(rank).release());
  }
  listeners.Append(std::make_unique<FailTogether>(rank).release());

  const int result = hvd::testing::run_all_tests(&argc, argv);
  MPI_Finalize();
  return result;
}
