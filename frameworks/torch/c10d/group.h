#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// The ranks of one c10d group as a process set, and the part that groups have in the process's
/// membership of the job. Thread-safe.
///
/// The first group of all ranks that a process makes in a job is the process set of all ranks. The
/// members make the set of each other group alone, because torch makes a group's backend on members
/// only.
class Group {
 public:
  /// Joins the job through the store unless this process has. @throws as C10dBackend's constructor
  Group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
        const std::vector<std::int64_t>& ranks, std::chrono::milliseconds timeout);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  /// Does not leave the job: a rank that ends after an error destroys its groups while the others
  /// wait for it, and would wait for them. The end of the process leaves the job.
  ~Group() { release(); }

  const ProcessSet& set() const noexcept { return set_; }
  /// The members, as ranks of the job, ascending.
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// The job's rank of a member. @throws UsageError for a rank that the group does not have
  int world_rank(std::int64_t group_rank) const;
  /// The group's rank of a member. @pre it is a member
  int group_rank(int world_rank) const;
  /// Leaves the job with the last group, if a group has joined it. The process set of another group
  /// is removed when all members have left. Does not wait for them. Idempotent.
  void leave() noexcept;

 private:
  /// Returns whether this is the first call.
  bool release() noexcept;
  /// Starts the removal of the process set.
  void remove_set() noexcept;

  const std::vector<int> ranks_;  // of the job, ascending
  ProcessSet set_;
  std::atomic<bool> left_ = false;
};

}  // namespace hvd::libtorch
