// Where calls of the simulated NCCL, and tests, wait.
#include <chrono>
#include <functional>

#include "support/fake_nccl.h"

namespace hvd::testing {

// Runs the device itself, because no other thread of the test may be running it.
bool FakeNccl::wait_for_device(int rank, std::unique_lock<std::recursive_mutex>& lock) {
  ++calls_under_way_;
  while (!closing_ && !gpu_.run_until_idle(rank))
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  --calls_under_way_;
  changed_.notify_all();
  return !closing_;
}

// Returns false if the communicator was aborted or revoked meanwhile.
bool FakeNccl::wait_in_call(nccl::Comm comm, std::unique_lock<std::recursive_mutex>& lock,
                            const std::function<bool()>& over) {
  ++calls_under_way_;
  ++member_of(comm).calls_inside;
  while (!closing_ && member_of(comm).alive && !over())
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  if (!member_of(comm).alive && options_.return_takes > std::chrono::milliseconds(0))
    changed_.wait_for(lock, options_.return_takes, [this] { return closing_; });
  --member_of(comm).calls_inside;
  --calls_under_way_;
  changed_.notify_all();
  return !closing_ && member_of(comm).alive;
}

bool FakeNccl::wait_for_aborts(int rank, int communicators) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(20),
                           [&] { return counts_[rank].aborted == communicators; });
}

}  // namespace hvd::testing
