#include "mpi/support/mpi_test.h"

#include <mpi.h>
#include <sched.h>

#include <numeric>

#include "hvd/error.h"

namespace hvd::testing {
namespace {

void wait_until(Duration timeout, const char* what, const std::function<bool()>& done) {
  const SteadyClock clock;
  const TimePoint end = clock.now() + timeout;
  while (!done()) {
    if (clock.now() > end)
      throw Error("rank " + std::to_string(mpi_rank()) + " waited in vain for " + what);
    sched_yield();
  }
}

}  // namespace

int mpi_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int mpi_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

void mpi_barrier() { MPI_Barrier(MPI_COMM_WORLD); }

control::Message receive(control::ControlPlane& plane, Duration timeout) {
  std::optional<control::Message> message;
  wait_until(timeout, "a control message", [&] { return (message = plane.poll()).has_value(); });
  return std::move(*message);
}

void complete(Work& work, Duration timeout) {
  wait_until(timeout, "a collective", [&] { return work.progress(); });
}

bool complete_all(std::vector<Work*> works, Duration timeout) {
  const SteadyClock clock;
  const TimePoint end = clock.now() + timeout;
  std::erase(works, nullptr);
  while (!works.empty() && clock.now() < end)
    std::erase_if(works, [](Work* work) { return work->progress(); });
  return works.empty();
}

std::vector<int> all_ranks() {
  std::vector<int> ranks(static_cast<std::size_t>(mpi_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace hvd::testing
