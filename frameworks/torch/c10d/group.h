#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// The ranks of one c10d group as a process set. Joins and leaves the job for its groups.
/// Thread-safe.
///
/// The first group of all ranks that a process makes in a job uses the process set of all ranks.
/// For every other group the members alone make a process set, because torch creates a group's
/// backend on its members only.
class Group {
 public:
  /// Joins the job through the store unless this process has already joined one. @throws as
  /// C10dBackend's constructor
  Group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
        const std::vector<std::int64_t>& ranks, std::chrono::milliseconds timeout);
  /// A group without members.
  Group(int rank, int size) : rank_(rank), size_(size) {}
  /// The group of all ranks of a job that this call forms: hvd::reconfigure(). It replaces a former
  /// group, which may have no members. Groups of a former job become invalid.
  /// @param timeout of the call
  /// @param stall_timeout of operations: hvd::Options::stall_shutdown
  /// @throws UsageError when the former group does not have all ranks of the job; as
  /// hvd::reconfigure()
  static std::shared_ptr<Group> reconfigured(Group& former, std::int64_t uuid,
                                             const std::vector<std::string>& handles,
                                             std::chrono::milliseconds timeout,
                                             std::chrono::milliseconds stall_timeout);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  /// Does not leave the job, because a rank that ends after an error destroys its groups while the
  /// other ranks wait for it, and would wait for them. The job is left at the end of the process.
  ~Group() { release(); }

  /// @throws UsageError without members, and after the end of the group's job in reconfigure()
  const ProcessSet& set() const;
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The members, as ranks of the job, ascending.
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// Whether the group belongs to the current job of the process.
  bool is_current() const noexcept;
  /// Distinguishes the jobs of a group that reconfigure() has formed: equal on all members.
  const std::string& instance() const noexcept { return instance_; }
  /// The job's rank of a member. @throws UsageError for a rank that the group does not have
  int world_rank(std::int64_t group_rank) const;
  /// The group's rank of a member. @pre it is a member
  int group_rank(int world_rank) const;
  /// Leaves the job if this is the last group and a group has joined the job. The process sets of
  /// other groups are removed when all their members have left, without waiting for them.
  /// Idempotent.
  void leave() noexcept;

 private:
  /// Returns whether this is the first call.
  bool release() noexcept;
  /// Starts the removal of the process set.
  void remove_set() noexcept;

  Group(std::vector<int> ranks, int rank, std::uint64_t job);

  std::vector<int> ranks_;  // of the job, ascending
  const int rank_;
  const int size_;
  std::uint64_t job_ = 0;  // counts the jobs of the process; 0: the group has no members
  std::string instance_;
  ProcessSet set_;
  std::atomic<bool> left_ = false;
};

}  // namespace hvd::libtorch
