#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

/// Operations that all members run now, in one call.
struct AgreedBatch {
  std::vector<wire::Response> operations = {};  ///< with the requests of this rank
  /// The numbers of this rank's uses of them, see Negotiator::submit(); empty where the rank is
  /// absent, and in a schedule to repeat.
  std::vector<std::uint64_t> uses = {};
  Members members = {};
  /// Members, as world ranks, that have joined and did not submit the operations. May contain this
  /// rank.
  std::vector<int> absent = {};
  bool absent_here = false;
  /// kJoin: the last rank to join. kAddProcessSet: the new set's number. (Both are alone in their
  /// batch.)
  std::int64_t result = -1;
};

/// The batches of one position of a schedule, which start together or not at all.
using AgreedBundle = std::vector<AgreedBatch>;

/// An operation of this rank that ends with an error.
struct FailedUse : wire::ErrorEntry {
  std::uint64_t use = 0;  ///< its number, see Negotiator::submit()
};

/// The effects of a plan on one rank.
struct Applied {
  std::vector<AgreedBatch> batches = {};  ///< of the process sets this rank is in
  std::vector<FailedUse> errors = {};
  bool shutdown = false;
  bool sets_changed = false;
  std::vector<int> sets_removed = {};
  /// Unless empty: the schedule that the members of `replayed_set` repeat, this rank among them.
  /// The operations of withdrawn_by_replay() that this rank has submitted and that have not been
  /// planned are withdrawn.
  std::vector<AgreedBundle> replay = {};
  int replayed_set = 0;
};

/// A rank's side of the negotiation: turns submissions into reports and plans into actions. Pure;
/// not thread-safe.
class Negotiator {
 public:
  Negotiator(int rank, ProcessSetTable, std::size_t cache_capacity);

  /// Submits a new use of an operation.
  /// @param use the caller's number for it, which apply() returns with the outcome
  /// @return the error with which it ends at once, if the other ranks have given up waiting for it
  /// @throws UsageError when it is too large for a message or this rank is not in the process set;
  /// hvd::Error when it is in flight.
  std::optional<wire::ErrorEntry> submit(wire::Request, std::uint64_t use = 0);
  /// The error that a replayed operation ends with, if the other ranks have given up waiting for
  /// it.
  std::optional<wire::ErrorEntry> consume_failure(const wire::Request&);
  /// Puts into the next report that this rank leaves.
  /// @param ended the process ends without a call of shutdown()
  void request_shutdown(bool ended = false) noexcept {
    shutdown_ = true;
    ended_ = ended;
  }

  /// Removes and returns the report of the changes since the last call, for the coordinator; no
  /// value when there are no changes.
  std::optional<wire::Report> next_report();

  /// @throws hvd::Error when the plan does not follow the last one or does not fit this rank's
  /// state.
  Applied apply(const wire::Plan&);

  /// Number of operations submitted here that no plan has named yet.
  std::size_t awaiting() const noexcept { return awaiting_.size(); }
  std::uint64_t last_applied() const noexcept { return last_applied_; }
  const ResponseCache& cache() const noexcept { return cache_; }
  const ProcessSetTable& process_sets() const noexcept { return sets_; }
  /// How many operations have been reported as one bit, and how many in full.
  std::uint64_t reported_by_bit() const noexcept { return by_bit_; }
  std::uint64_t reported_in_full() const noexcept { return in_full_; }

 private:
  void check_submission(const wire::Request&) const;
  /// Whether this rank takes part in the operation.
  bool is_member(const wire::Request&) const;
  /// This rank's position among the members, or -1.
  int position_in(const wire::Request&) const;
  void check_planned(const wire::Response&, const std::vector<int>& absent) const;
  void apply_batch(const wire::Batch&, Applied&);
  void agree(const wire::Response&, std::uint64_t ordinal, AgreedBatch&);
  void apply_set_change(const wire::Request&, AgreedBatch&, Applied&);
  void end_set(int process_set, Applied&);
  void forget_unsent(int process_set, const std::string& name);
  void apply_error(const wire::ErrorEntry&, Applied&);
  void apply_replay(const std::vector<wire::SlotBundle>&, Applied&);
  int set_of(const std::vector<wire::SlotBundle>&) const;
  AgreedBatch replayed_batch(const std::vector<std::uint32_t>& slots, int process_set) const;
  void withdraw(int replayed_set);

  const int rank_;
  ProcessSetTable sets_;  ///< as of the last plan applied
  ResponseCache cache_;
  std::uint64_t last_applied_ = 0;
  std::uint64_t last_reported_ = 0;
  std::uint64_t reports_ = 0;
  bool shutdown_ = false;
  bool ended_ = false;
  bool shutdown_reported_ = false;
  std::optional<std::string> join_;    // set/name of this rank's join(), once it was reported
  bool was_joined_ = false;            // before the plan that is being applied
  std::vector<wire::Request> unsent_;  // in order of submission
  struct Awaited {
    std::uint64_t use = 0;
    bool sent = false;
    bool ends_replays = false;  ///< see ends_all_replays()
  };
  std::unordered_map<std::string, Awaited> awaiting_;  // by set/name
  /// set/name -> the errors that end the next uses, one per use: the other ranks may have given up
  /// several uses before this rank submits the first.
  std::unordered_map<std::string, std::deque<wire::ErrorEntry>> failed_in_advance_;
  std::uint64_t by_bit_ = 0;
  std::uint64_t in_full_ = 0;
};

}  // namespace hvd::control
