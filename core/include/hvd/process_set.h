#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvd {

/// @addtogroup start
/// @{

/// How a process set is made.
struct ProcessSetOptions {
  /// Only the members call add_process_set(), and later remove_process_set(); the other ranks do
  /// not take part.
  bool by_members = false;
  /// With `by_members`: at most 3,800 bytes. Sets that a rank makes at the same time, in several
  /// threads, need different names. Sets of different ranks may have the same name.
  std::string name = {};
};

/// A group of ranks that communicate among themselves. A value, cheap to copy; the
/// default-constructed one is all ranks. Thread-safe.
class ProcessSet {
 public:
  /// All ranks of the job.
  ProcessSet() = default;

  /// 0 for all ranks; otherwise a number that is the same on every rank.
  int id() const noexcept { return members_ ? members_->id : 0; }
  /// This process's position in the set, or -1 outside it.
  int rank() const;
  int size() const;
  bool included() const { return rank() >= 0; }
  /// World ranks, ascending; a member's position is its rank in the set.
  std::vector<int> ranks() const;

 private:
  struct Members {
    int id;
    std::vector<int> ranks;
  };
  explicit ProcessSet(Members members)
      : members_(std::make_shared<const Members>(std::move(members))) {}
  friend ProcessSet add_process_set(std::vector<int> ranks, const ProcessSetOptions&);

  std::shared_ptr<const Members> members_;
};

/// Makes a set of these world ranks, in any order. Collective over all ranks of the job, members or
/// not, with equal arguments. Sets may overlap, and several may have the same members; their
/// numbers are not reused. Thread-safe.
/// @throws UsageError for an empty list, a repeated rank or one that does not exist; MismatchError
/// when the ranks pass different sets or a rank has called join(); StalledError, PeerLostError,
/// ShutdownError.
ProcessSet add_process_set(std::vector<int> ranks);

/// With `by_members` it is collective over the members only. Disjoint and overlapping sets may be
/// made at the same time by different ranks. Members match their calls by the ranks and the name,
/// and repeated calls by their order. Members that make sets of one name from different lists, or
/// in different orders, and therefore wait for each other, get MismatchError, which names the ranks
/// and their lists.
/// @throws as above, and UsageError with `by_members` on a rank outside of the list or while this
/// rank makes another set of this name, and for a name without `by_members`
ProcessSet add_process_set(std::vector<int> ranks, const ProcessSetOptions& options);

/// Removes a set. Collective over all ranks, or over the members if they made it alone. Operations
/// of the set that have not been agreed on end with UsageError, and so do later ones.
/// @throws UsageError for the set of all ranks or one that was removed before; otherwise as
/// add_process_set().
void remove_process_set(const ProcessSet&);

/// @}

}  // namespace hvd
