#include "transport/mpi/communicator.h"

#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/mpi/call_watch.h"
#include "transport/mpi/environment.h"

// Note [Freeing a communicator]
// MPI_Comm_free is collective, and destructors here are not. Freeing at once would also be wrong:
// MPI assigns the context id to the next communicator, and a late message of the old one would be
// matched in the new one. The destructor therefore only stores the handle, and
// free_retired_communicators() frees it on all ranks once they have joined the next job. The ranks
// have exchanged messages since, so no old message is under way. At the end of the process
// MPI_Finalize frees the rest. After a failure they are never freed.

namespace hvd::mpi {
namespace {

struct Retired {
  Mutex mutex;
  std::vector<MPI_Comm> handles HVD_GUARDED_BY(mutex);
};

// Never destroyed: owners may be static objects.
Retired& retired() {
  static auto* const instance = new Retired;
  return *instance;
}

void retire(MPI_Comm handle) noexcept {
  if (handle == MPI_COMM_NULL) return;
  try {
    Retired& owner = retired();
    const MutexLock lock(owner.mutex);
    owner.handles.push_back(handle);
  } catch (...) {
    // Out of memory: MPI_Finalize frees the communicator.
  }
}

/// While it exists, calls on the communicator return error codes. The destructor restores the
/// program's handler.
class ReturnErrors {
 public:
  explicit ReturnErrors(MPI_Comm handle) : handle_(handle) {
    MPI_Comm_get_errhandler(handle_, &before_);
    MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN);
  }
  ReturnErrors(const ReturnErrors&) = delete;
  ReturnErrors& operator=(const ReturnErrors&) = delete;
  ~ReturnErrors() {
    MPI_Comm_set_errhandler(handle_, before_);
    MPI_Errhandler_free(&before_);
  }

 private:
  MPI_Comm handle_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

void wait_for_all(MPI_Request& request, Deadline deadline, const char* call, int size,
                  const std::function<void()>& check_ranks = {}) {
  const bool arrived = poll_until(deadline, [&] {
    int done = 0;
    {
      const WatchedCall watched(call);
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
    }
    if (done == 0 && check_ranks) check_ranks();
    return done != 0;
  });
  if (arrived) return;
  mark_failed();
  throw PeerLostError(
      text("init: not all ", size, " ranks arrived in time (", call,
           " was still waiting after HVD_START_TIMEOUT); check that every rank of the job calls "
           "hvd::init(), and whether a rank ended early"),
      -1);
}

}  // namespace

Communicator::Communicator(MPI_Comm handle) : handle_(handle) {
  check(MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(handle_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(handle_, &size_), "MPI_Comm_size");
}

Communicator::Communicator(Communicator&& other) noexcept
    : handle_(std::exchange(other.handle_, MPI_COMM_NULL)),
      rank_(other.rank_),
      size_(other.size_) {}

Communicator& Communicator::operator=(Communicator&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(rank_, other.rank_);
  std::swap(size_, other.size_);
  return *this;
}

Communicator::~Communicator() { retire(handle_); }

Communicator Communicator::duplicate(MPI_Comm parent, Deadline deadline) {
  const ReturnErrors errors(parent);
  int size = 0;
  check(MPI_Comm_size(parent, &size), "MPI_Comm_size");
  // On the heap, because MPI may still write to both after a missed deadline.
  struct Pending {
    MPI_Comm handle = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  auto* const pending = new Pending;
  {
    const WatchedCall watched("MPI_Comm_idup");
    check(MPI_Comm_idup(parent, &pending->handle, &pending->request), "MPI_Comm_idup");
  }
  wait_for_all(pending->request, deadline, "MPI_Comm_idup", size);
  const MPI_Comm handle = pending->handle;
  delete pending;
  return Communicator(handle);
}

int Communicator::tag_upper_bound() const {
  constexpr int kLowestAllowed = 32767;
  void* value = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(handle_, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
  return found ? *static_cast<int*>(value) : kLowestAllowed;
}

void Communicator::allgather(const void* mine, void* all, int bytes, Deadline deadline,
                             const std::function<void()>& check_ranks) const {
  // Copies that outlive a missed deadline, when MPI may still read and write them.
  struct Pending {
    std::vector<char> mine;
    std::vector<char> all;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  const auto* const source = static_cast<const char*>(mine);
  auto* const pending = new Pending;
  pending->mine.assign(source, source + bytes);
  pending->all.resize(static_cast<std::size_t>(bytes) * static_cast<std::size_t>(size_));
  {
    const WatchedCall watched("MPI_Iallgather");
    check(MPI_Iallgather(pending->mine.data(), bytes, MPI_BYTE, pending->all.data(), bytes,
                         MPI_BYTE, handle_, &pending->request),
          "MPI_Iallgather");
  }
  wait_for_all(pending->request, deadline, "MPI_Iallgather", size_, check_ranks);
  std::copy(pending->all.begin(), pending->all.end(), static_cast<char*>(all));
  delete pending;
}

void free_retired_communicators() {
  std::vector<MPI_Comm> handles;
  {
    Retired& owner = retired();
    const MutexLock lock(owner.mutex);
    handles.swap(owner.handles);
  }
  if (has_failed() || !is_active()) return;
  const WatchedCall watched("MPI_Comm_free");
  for (MPI_Comm& handle : handles) check(MPI_Comm_free(&handle), "MPI_Comm_free");
}

}  // namespace hvd::mpi
