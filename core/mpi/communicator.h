#pragma once

#include <mpi.h>

#include "base/poll_until.h"

namespace hvd::mpi {

/// Owns a duplicate of a communicator, on which errors are returned and not fatal. Move-only.
///
/// Not thread-safe: the thread that drives the engine. The destructor calls no MPI function. See
/// Note [Who frees a communicator].
class Communicator {
 public:
  Communicator() = default;
  Communicator(Communicator&& other) noexcept;
  Communicator& operator=(Communicator&& other) noexcept;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  /// Collective over `parent`, but it waits no longer than until the deadline.
  /// @throws PeerLostError when not every rank has arrived by then; the duplication is then left to
  /// MPI for good.
  static Communicator duplicate(MPI_Comm parent, Deadline deadline);

  MPI_Comm get() const noexcept { return handle_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The highest tag that messages may carry.
  int tag_upper_bound() const;

  /// Every rank contributes `bytes` bytes; all receive everything, in rank order. Collective, with
  /// a deadline like duplicate().
  void allgather(const void* mine, void* all, int bytes, Deadline deadline) const;

 private:
  explicit Communicator(MPI_Comm handle);

  MPI_Comm handle_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
};

/// Frees the communicators whose owners have gone, on every rank at the same point: right after a
/// later job has started. Does nothing after a failure.
void free_retired_communicators();

}  // namespace hvd::mpi
