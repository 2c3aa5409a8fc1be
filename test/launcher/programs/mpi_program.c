/* One rank's MPI program for the launcher's tests: mpi_program MODE. Rank 1 follows MODE; the
 * others wait in a barrier. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "sum";
  int rank = 0, size = 0, sum = 0;
  char host[256] = "";
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  gethostname(host, sizeof host - 1);
  if (rank == 1) {
    if (strcmp(mode, "abort") == 0) MPI_Abort(MPI_COMM_WORLD, 5);
    if (strcmp(mode, "leave") == 0) exit(0);
    if (strcmp(mode, "kill") == 0) raise(SIGKILL);
    if (strcmp(mode, "segv") == 0) raise(SIGSEGV);
  }
  const int mine = (rank + 1) * (rank + 1);
  MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  const char* local = getenv("HVD_LOCAL_RANK");
  const char* local_size = getenv("HVD_LOCAL_SIZE");
  const char* given = getenv("LAUNCHER_TEST_GIVEN");
  const char* forwarded = getenv("NCCL_LAUNCHER_TEST");
  printf("rank %d of %d on %s local %s of %s sum %d given %s forwarded %s\n", rank, size, host,
         local, local_size, sum, given != NULL ? given : "-", forwarded != NULL ? forwarded : "-");
  fflush(stdout);
  if (strcmp(mode, "stay") == 0) sleep(60);
  MPI_Finalize();
  return 0;
}
