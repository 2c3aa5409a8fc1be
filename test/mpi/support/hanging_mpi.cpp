#include "mpi/support/hanging_mpi.h"

#include <mpi.h>
#include <unistd.h>

namespace hvd::testing {
HangingMpi hanging_mpi;
}

extern "C" {

int MPI_Init_thread(int* count, char*** arguments, int required, int* provided) {
  if (hvd::testing::hanging_mpi.before_init != nullptr) hvd::testing::hanging_mpi.before_init();
  return PMPI_Init_thread(count, arguments, required, provided);
}

int MPI_Improbe(int from, int tag, MPI_Comm communicator, int* found, MPI_Message* message,
                MPI_Status* status) {
  while (!hvd::testing::hanging_mpi.improbe_returns) ::pause();
  return PMPI_Improbe(from, tag, communicator, found, message, status);
}

}  // extern "C"
