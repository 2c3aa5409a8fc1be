#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace hvd {

/// @addtogroup start
/// @{

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
  friend ProcessSet add_process_set(std::vector<int> ranks);

  std::shared_ptr<const Members> members_;
};

/// Makes a set of these world ranks, in any order. Collective over all ranks of the job, members or
/// not, with equal arguments. Sets may overlap, and several may have the same members; their
/// numbers are not reused.
/// @throws UsageError for an empty list, a repeated rank or one that does not exist; MismatchError
/// when the ranks pass different sets or a rank has called join(); StalledError, PeerLostError,
/// ShutdownError.
ProcessSet add_process_set(std::vector<int> ranks);

/// Removes a set. Collective over all ranks. Operations of the set that have not been agreed on end
/// with UsageError, and so do later ones.
/// @throws UsageError for the set of all ranks or one that was removed before; otherwise as
/// add_process_set().
void remove_process_set(const ProcessSet&);

/// @}

}  // namespace hvd
