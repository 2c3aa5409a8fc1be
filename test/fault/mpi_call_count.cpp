// Replaces MPI's functions through its profiling interface. Each replacement counts the call and
// forwards it to MPI.
#include "fault/mpi_call_count.h"

#include <mpi.h>

#include <atomic>

namespace hvd::testing {
namespace {
std::atomic<std::uint64_t> calls{0};
}  // namespace
std::uint64_t mpi_calls() noexcept { return calls.load(); }
}  // namespace hvd::testing

extern "C" {

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Isend(data, count, type, to, tag, communicator, request);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm communicator,
              MPI_Request* request) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Irecv(data, count, type, from, tag, communicator, request);
}
int MPI_Imrecv(void* data, int count, MPI_Datatype type, MPI_Message* message,
               MPI_Request* request) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Imrecv(data, count, type, message, request);
}
int MPI_Improbe(int from, int tag, MPI_Comm communicator, int* found, MPI_Message* message,
                MPI_Status* status) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Improbe(from, tag, communicator, found, message, status);
}
int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Test(request, done, status);
}
int MPI_Testall(int count, MPI_Request requests[], int* done, MPI_Status statuses[]) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Testall(count, requests, done, statuses);
}
int MPI_Testsome(int count, MPI_Request requests[], int* done, int indices[],
                 MPI_Status statuses[]) {
  hvd::testing::calls.fetch_add(1);
  return PMPI_Testsome(count, requests, done, indices, statuses);
}

}  // extern "C"
