#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/engine_front.h"
#include "engine/operation_state.h"
#include "hvd/collectives.h"

namespace hvd::runtime {

/// The operations of a rank by process set and name: those in flight, whose names are taken, and
/// those that may come again, whose states are then used again. Gives unnamed ones their numbers.
///
/// Thread-safe.
class OperationTable {
 public:
  /// @param front where operations go; outlives this
  /// @param rank this one, among all of the job
  /// @param gpu this rank's, as this process counts them
  OperationTable(EngineFront& front, int rank, std::optional<int> gpu)
      : front_(front), rank_(rank), gpu_(gpu) {}

  /// Makes operations and hands them to the engine, all or none.
  /// @param handles as many; they hold nothing
  /// @param owner whom the operations' waiters ask to drive
  /// @throws UsageError; the cause of failure when the engine has failed; ShutdownError once
  /// shutdown was requested
  void submit(std::span<const Submission>, std::span<Operation> handles,
              const std::weak_ptr<Runtime>& owner, TimePoint now);
  /// The operation has ended: its name may be used again. Ignores an operation that was not made
  /// here.
  void release(OperationState&);
  /// Some operation in flight calls the program back.
  bool calls_back() const noexcept { return callbacks_.load(std::memory_order_relaxed) != 0; }
  /// Whoever is in submit() has left it when this returns.
  void wait_for_submissions() { const MutexLock lock(mutex_); }

 private:
  using Key = std::pair<int, std::string_view>;  // the name is that of the operation's request
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::string_view>()(key.second) ^
             (static_cast<std::size_t>(key.first) * 0x9E3779B97F4A7C15u);
    }
  };

  void check_running() const;
  OperationPtr claim(const Submission&, const std::weak_ptr<Runtime>&, TimePoint now)
      HVD_REQUIRES(mutex_);
  OperationPtr claim_again(const Submission&, TimePoint now) HVD_REQUIRES(mutex_);
  wire::Request number(const Submission&) HVD_REQUIRES(mutex_);
  void take_back() HVD_REQUIRES(mutex_);
  void forget(const wire::Request&) HVD_REQUIRES(mutex_);
  void remember(OperationState&) HVD_REQUIRES(mutex_);
  void unlink(OperationState&) HVD_REQUIRES(mutex_);

  EngineFront& front_;
  const int rank_;
  const std::optional<int> gpu_;
  std::atomic<int> callbacks_{0};  // operations in flight that call the program back

  Mutex mutex_;
  std::unordered_map<Key, OperationPtr, Hash> operations_ HVD_GUARDED_BY(mutex_);
  // Those of operations_ that have ended, in the order in which they did.
  OperationState* first_released_ HVD_GUARDED_BY(mutex_) = nullptr;
  OperationState* last_released_ HVD_GUARDED_BY(mutex_) = nullptr;
  std::vector<OperationPtr> claimed_ HVD_GUARDED_BY(mutex_);  // by the submit() that holds it
  std::map<std::pair<int, OpKind>, std::uint64_t> ordinals_
      HVD_GUARDED_BY(mutex_);                       // of unnamed operations
  std::uint64_t joins_ HVD_GUARDED_BY(mutex_) = 0;  // that have succeeded
  bool joined_ HVD_GUARDED_BY(mutex_) = false;      // a join() is in flight
};

}  // namespace hvd::runtime
