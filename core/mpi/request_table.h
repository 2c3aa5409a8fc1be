#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd::mpi {

/// The messages that one Work has under way, each in a numbered slot.
///
/// Not thread-safe: the thread that drives the engine. Peers are world ranks. Allocates in reset()
/// only. Does not wait, cancel or free: a request that is still under way when its Work is dropped
/// stays MPI's. See Note [Who frees the buffer].
class RequestTable {
 public:
  explicit RequestTable(MPI_Comm communicator) : communicator_(communicator) {}

  /// Empties the table, which must be idle, and gives it `slots` slots.
  void reset(std::size_t slots);

  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, int tag);
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, int tag);

  bool idle(std::size_t slot) const noexcept { return requests_[slot] == MPI_REQUEST_NULL; }
  int in_flight() const noexcept { return in_flight_; }
  int peer(std::size_t slot) const noexcept { return expected_[slot].peer; }

  /// Lets MPI work, and returns the slots whose messages have completed since the last call. Valid
  /// until the next call.
  std::span<const int> test();

 private:
  struct Expected {
    int peer = -1;
    int bytes = -1;  ///< of a receive; -1 for a send
  };
  void started(std::size_t slot, int peer, int bytes) noexcept;
  void examine(int slot, const MPI_Status&) const;

  MPI_Comm communicator_;
  std::vector<MPI_Request> requests_;
  std::vector<Expected> expected_;
  std::vector<int> completed_;
  std::vector<MPI_Status> statuses_;
  int in_flight_ = 0;
};

}  // namespace hvd::mpi
