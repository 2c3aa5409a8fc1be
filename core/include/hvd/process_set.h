#pragma once

#include <memory>
#include <vector>

namespace hvd {

/// A group of ranks that communicate among themselves. A value, cheap to copy; the
/// default-constructed one is all ranks. Thread-safe.
class ProcessSet {
 public:
  /// All ranks of the job.
  ProcessSet() = default;

  /// 0 for all ranks; otherwise the number that every rank knows it by.
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
  std::shared_ptr<const Members> members_;
};

}  // namespace hvd
