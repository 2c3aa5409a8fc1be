#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/mutex.h"

namespace hvd::testing {

/// A member's arguments of a collective. The member owns the memory. The spans in `collective` are
/// valid until its Work is destroyed.
struct Contribution {
  Collective collective;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
};

/// A collective that the members of a group carry out together.
struct GroupCollective {
  std::uint64_t number = 0;
  /// By set rank. Written under the group's mutex, and constant once `contributed` is the size of
  /// the group.
  std::vector<Contribution> contributions = {};
  int first = -1;  ///< set rank of the first member to contribute
  std::atomic<int> contributed{0};
  std::atomic<int> finished{0};  ///< members that have done their share
  std::atomic<int> busy{0};      ///< members that access the memory of others
};

/// The state that the members of one channel share. Thread-safe. The members own it jointly.
///
/// A group ends once, with the first cause. Complete collectives then stay complete, and no rank
/// accesses the memory of another any more. See Note [Two collectives are enough].
class LocalGroup {
 public:
  LocalGroup(int process_set, std::vector<int> ranks);

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  int world_rank(int set_rank) const { return ranks_[static_cast<std::size_t>(set_rank)]; }

  /// Adds a member's contribution to the collective `number`. Null when abort() has ended the
  /// group.
  /// @param complete set to whether all members have contributed now
  /// @throws PeerLostError or Error when the group has ended otherwise; Error when the parameters
  /// differ from the first member's, which ends the group
  GroupCollective* contribute(int set_rank, std::uint64_t number, const Contribution&,
                              bool* complete);

  /// A member leaves before a collective is complete: the other members get a PeerLostError.
  void leave(int set_rank, const std::string& doing) noexcept;
  /// A member's job has failed. The other members get no error from this group, because their own
  /// job reports the cause.
  void abort() noexcept;
  /// Ends the group with an Error of this text and throws it.
  [[noreturn]] void fail(const std::string& message);

  /// Rings the doorbells of all members but this one.
  void ring_others(int set_rank, Peers&) const noexcept;

  bool ended() const noexcept { return ended_.load(std::memory_order_seq_cst); }
  /// Throws the cause of the end. Returns after abort(), or if the group has not ended.
  void raise() const;

  /// "process set 3, operation 17".
  std::string where(std::uint64_t number) const;

 private:
  enum class End { kNone, kAborted, kLost, kMismatch };
  void end(End, int lost_rank, std::string message) noexcept HVD_REQUIRES(mutex_);
  void raise_end() const HVD_REQUIRES(mutex_);
  [[noreturn]] void end_with_mismatch(const std::string& message) HVD_REQUIRES(mutex_);

  const int process_set_;
  const std::vector<int> ranks_;
  mutable Mutex mutex_;
  /// Members use a complete collective, and its atomics, without the lock.
  std::array<GroupCollective, 2> collectives_ HVD_GUARDED_BY(mutex_);
  End end_ HVD_GUARDED_BY(mutex_) = End::kNone;
  int lost_rank_ HVD_GUARDED_BY(mutex_) = -1;
  std::string message_ HVD_GUARDED_BY(mutex_);
  std::atomic<bool> ended_{false};
};

}  // namespace hvd::testing
