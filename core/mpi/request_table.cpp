#include "mpi/request_table.h"

#include <string>

#include "hvd/error.h"
#include "mpi/call_watch.h"
#include "mpi/mpi_error.h"

namespace hvd::mpi {

void RequestTable::reset(std::size_t slots) {
  if (in_flight_ != 0)
    throw Error("mpi: a collective was launched while messages of the last one are under way");
  requests_.assign(slots, MPI_REQUEST_NULL);
  expected_.assign(slots, Expected{});
  completed_.resize(slots);
  statuses_.resize(slots);
}

void RequestTable::started(std::size_t slot, int peer, int bytes) noexcept {
  expected_[slot] = {peer, bytes};
  ++in_flight_;
}

void RequestTable::send(std::size_t slot, std::span<const std::byte> bytes, int peer, int tag) {
  const WatchedCall watched("MPI_Isend", peer);
  check(MPI_Isend(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, peer, tag, communicator_,
                  &requests_[slot]),
        "MPI_Isend", peer);
  started(slot, peer, -1);
}

void RequestTable::receive(std::size_t slot, std::span<std::byte> bytes, int peer, int tag) {
  const WatchedCall watched("MPI_Irecv", peer);
  check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, peer, tag, communicator_,
                  &requests_[slot]),
        "MPI_Irecv", peer);
  started(slot, peer, static_cast<int>(bytes.size()));
}

void RequestTable::examine(int slot, const MPI_Status& status) const {
  const Expected& expected = expected_[static_cast<std::size_t>(slot)];
  if (expected.bytes < 0) return;
  int received = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &received), "MPI_Get_count", expected.peer);
  if (received == expected.bytes) return;
  throw Error("mpi: rank " + std::to_string(expected.peer) + " sent " + std::to_string(received) +
              " bytes, expected " + std::to_string(expected.bytes) +
              "; do all ranks run the same build with the same settings?");
}

std::span<const int> RequestTable::test() {
  if (in_flight_ == 0) return {};
  int count = 0;
  const WatchedCall watched("MPI_Testsome");
  // Twice, because Open MPI looks first and fetches what has arrived afterwards; see
  // MpiControlPlane::start_receive().
  for (int attempt = 0; attempt < 2 && count == 0; ++attempt) {
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  completed_.data(), statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (std::size_t index = 0; index < static_cast<std::size_t>(count); ++index) {
        const Expected& expected = expected_[static_cast<std::size_t>(completed_[index])];
        check(statuses_[index].MPI_ERROR, expected.bytes < 0 ? "MPI_Isend" : "MPI_Irecv",
              expected.peer);
      }
    }
    check(code, "MPI_Testsome");
    if (count == MPI_UNDEFINED) throw Error("mpi: messages are under way, yet MPI knows of none");
  }
  in_flight_ -= count;
  for (std::size_t index = 0; index < static_cast<std::size_t>(count); ++index)
    examine(completed_[index], statuses_[index]);
  return {completed_.data(), static_cast<std::size_t>(count)};
}

}  // namespace hvd::mpi
