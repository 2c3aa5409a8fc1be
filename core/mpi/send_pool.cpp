#include "mpi/send_pool.h"

#include <utility>

#include "mpi/call_watch.h"
#include "mpi/mpi_error.h"

namespace hvd::mpi {
namespace {

// What is kept for the next messages: enough that a busy coordinator allocates nothing, and no more
// than 4 MiB.
constexpr std::size_t kIdleParcels = 64;
constexpr std::size_t kIdleParcelBytes = 64 * 1024;

}  // namespace

SendPool::~SendPool() {
  for (auto& parcel : active_) static_cast<void>(parcel.release());
}

void SendPool::send(std::span<const std::byte> message, std::span<const int> ranks, int tag) {
  if (ranks.empty()) return;
  std::unique_ptr<Parcel> parcel;
  if (idle_.empty()) {
    parcel = std::make_unique<Parcel>();
  } else {
    parcel = std::move(idle_.back());
    idle_.pop_back();
  }
  parcel->bytes.assign(message.begin(), message.end());
  parcel->ranks.assign(ranks.begin(), ranks.end());
  parcel->requests.assign(ranks.size(), MPI_REQUEST_NULL);
  // Before the first send, so that a failure half-way leaves the parcel where the destructor leaks
  // it.
  active_.push_back(std::move(parcel));
  Parcel& started = *active_.back();
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    const WatchedCall watched("MPI_Isend", ranks[index]);
    check(MPI_Isend(started.bytes.data(), static_cast<int>(started.bytes.size()), MPI_BYTE,
                    ranks[index], tag, communicator_, &started.requests[index]),
          "MPI_Isend of a control message", ranks[index]);
  }
  if (finished(started)) recycle(active_.size() - 1);
}

bool SendPool::finished(Parcel& parcel) {
  int done = 0;
  const WatchedCall watched("MPI_Testall",
                            parcel.ranks.size() == 1 ? parcel.ranks.front() : kNoPeer);
  check(MPI_Testall(static_cast<int>(parcel.requests.size()), parcel.requests.data(), &done,
                    MPI_STATUSES_IGNORE),
        "sending a control message", parcel.ranks.size() == 1 ? parcel.ranks.front() : kNoPeer);
  return done != 0;
}

void SendPool::recycle(std::size_t index) {
  std::unique_ptr<Parcel> parcel = std::move(active_[index]);
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(index));
  if (idle_.size() < kIdleParcels && parcel->bytes.capacity() <= kIdleParcelBytes)
    idle_.push_back(std::move(parcel));
}

}  // namespace hvd::mpi
