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

namespace hvd::local {

/// What one member brought to a collective. The memory belongs to that member, and `collective`'s
/// spans to its Work.
struct Post {
  Collective collective;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
};

/// One collective that the members of a group carry out together.
struct Meeting {
  std::uint64_t number = 0;
  std::vector<Post> posts =
      {};  ///< by set rank; written under the group's mutex, read freely once `posted` is complete
  int first = -1;  ///< set rank of the first to post
  std::atomic<int> posted{0};
  std::atomic<int> finished{0};  ///< members that have done their share
  std::atomic<int> busy{0};      ///< members at work on others' memory right now
};

/// Where the members of one channel meet. Thread-safe; owned jointly by the members, so that it
/// outlives any that dies.
///
/// It ends once, for the first cause given; what is complete then stays complete, and nothing else
/// touches a member's memory any more. See Note [Two meetings are enough].
class LocalGroup {
 public:
  LocalGroup(int process_set, std::vector<int> ranks);

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// World rank of a member.
  int world_rank(int set_rank) const { return ranks_[static_cast<std::size_t>(set_rank)]; }

  /// Joins the collective of this number; `*last` tells whether all have posted now. Null when the
  /// group was ended by abort().
  /// @throws PeerLostError or Error when it has ended otherwise; Error when the parameters differ
  /// from the first member's, which ends it.
  Meeting* post(int set_rank, std::uint64_t number, const Post&, bool* last);

  /// A member goes away with its part in something undone: PeerLostError for everyone else.
  void leave(int set_rank, const std::string& doing) noexcept;
  /// A member gives up because its job has failed: the others get no error from here, as this is
  /// not the cause; they learn that from where this member learned it.
  void abort() noexcept;
  /// Ends the group with an Error of this text and throws it.
  [[noreturn]] void fail(const std::string& message);

  bool ended() const noexcept { return ended_.load(std::memory_order_seq_cst); }
  /// Throws why the group has ended. Does nothing after abort(), or while it has not.
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
  /// A complete one, and the atomics in it, are used without the lock.
  std::array<Meeting, 2> meetings_ HVD_GUARDED_BY(mutex_);
  End end_ HVD_GUARDED_BY(mutex_) = End::kNone;
  int lost_rank_ HVD_GUARDED_BY(mutex_) = -1;
  std::string message_ HVD_GUARDED_BY(mutex_);
  std::atomic<bool> ended_{false};
};

/// "allreduce sum float32, count 7, ...", in messages.
std::string describe(const Collective&);

}  // namespace hvd::local
