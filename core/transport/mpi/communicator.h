#pragma once

#include <mpi.h>

#include <functional>

#include "base/clock.h"

namespace hvd::mpi {

/// Owns a duplicate of a communicator that returns errors and does not abort the job. Move-only.
///
/// Not thread-safe: only the thread that drives the engine calls it. The destructor calls no MPI
/// function; see Note [Freeing a communicator].
class Communicator {
 public:
  Communicator() = default;
  Communicator(Communicator&& other) noexcept;
  Communicator& operator=(Communicator&& other) noexcept;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  /// Duplicates `parent`. Collective over it, but waits at most until the deadline.
  /// @throws PeerLostError when a rank has not called it by the deadline. The duplicate then stays
  /// incomplete and is never freed.
  static Communicator duplicate(MPI_Comm parent, Deadline deadline);

  MPI_Comm get() const noexcept { return handle_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The highest valid tag of a message.
  int tag_upper_bound() const;

  /// Gathers `bytes` bytes of each rank on all ranks, in rank order. Collective, and waits at most
  /// until the deadline, like duplicate().
  /// @param check_ranks called repeatedly while this rank waits. An error that it throws ends the
  /// wait, and the operation stays incomplete
  void allgather(const void* mine, void* all, int bytes, Deadline deadline,
                 const std::function<void()>& check_ranks = {}) const;

 private:
  explicit Communicator(MPI_Comm handle);

  MPI_Comm handle_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
};

/// Frees the communicators whose owners have been destroyed. All ranks call it at the same point:
/// right after a later job has started. No effect after a failure.
void free_retired_communicators();

}  // namespace hvd::mpi
