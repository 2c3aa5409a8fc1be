#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "hvd/status.h"
#include "negotiation/fusion_planner.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"

namespace hvd::control {

struct TensorGroup;

/// An operation that some, but not all, members of its set have submitted, or whose group is not
/// complete.
struct PendingTensor {
  wire::Request request = {};  ///< of `reference_rank`
  int reference_rank = 0;      ///< the lowest that has reported
  /// The lowest rank whose request differs from that of `reference_rank`, and its request.
  struct Dissent {
    wire::Request request = {};
    int rank = 0;
  };
  std::optional<Dissent> dissent = {};
  int members = 0;           ///< of the set
  RankSet own_members = {};  ///< if request.by_members(): the ranks that submit it
  RankSet reported = {};
  RankSet absent = {};                        ///< have joined and did not report
  int missing = 0;                            ///< members that neither reported nor are absent
  std::vector<std::int64_t> first_dims = {};  ///< if wire::gathers(kind): per position
  std::optional<std::string> mismatch = {};   ///< once complete: why it cannot run
  /// Set while every report so far was a hit on this slot.
  std::optional<std::uint32_t> cached_slot = {};
  /// More than one only when ranks disagree about the group.
  std::vector<std::shared_ptr<TensorGroup>> groups = {};
  bool held = false;   ///< complete, but its group is not
  bool ready = false;  ///< can be planned, and has not been extracted
  TimePoint first_seen{};
  /// The stamp of the lowest-ranked member that has reported. It counts that rank's own
  /// submissions, so it is the same in every run, independently of the ranks' relative speed.
  wire::Stamp order = 0;
  bool warned = false;
};

/// Ranks that submit the same operation, except for the first dimensions of a gathering one.
struct Submitters {
  RankSpan ranks = {};    ///< not empty
  wire::Stamp stamp = 0;  ///< of the lowest rank
  /// The first dimensions of `ranks`, in ascending order of ranks. Empty: they are in
  /// first_dims_of_members or, if that is null, in the request.
  std::span<const wire::DimRun> first_dims = {};
  const std::vector<std::int64_t>* first_dims_of_members = nullptr;
  /// The cache slot that they hit, if it still holds the same response. Empty: they sent the
  /// request in full, or hit a slot that holds another response now.
  std::optional<std::uint32_t> slot = {};
};

using PendingList = std::list<PendingTensor>;  // oldest first
using PendingRef = PendingList::iterator;

/// One use of a group. It ends when all its members have been submitted and have left the table, so
/// a failure also applies to members that no rank has submitted yet. A member that is submitted a
/// second time begins the next use. (A correct program submits all members before it waits for
/// one.)
struct TensorGroup {
  std::string key = {};
  int size = 0;
  std::map<int, std::string> seen = {};  ///< index -> key of each member that was submitted
  int gone = 0;                          ///< how many of these have left the table
  std::vector<PendingRef> held = {};     ///< complete, waiting for the others
  std::optional<Status> failure = {};    ///< of the first member that failed
};

/// The pending operations, and the ranks that have submitted each. Coordinator only; pure; not
/// thread-safe.
class ReadyTable {
 public:
  explicit ReadyTable(const ProcessSetTable& sets) : sets_(sets) {}

  /// Records that these ranks have submitted an operation.
  /// @param request that of the lowest rank
  /// @return the tensor, which may now be complete
  /// @throws hvd::Error when a rank submits a name that is still pending
  PendingRef add(const Submitters&, wire::Request request, TimePoint now);
  /// A fast add() for hits on a slot whose pending tensor was submitted by hits only.
  /// @return false if the caller has to call add() instead
  /// @pre the submitters have a slot
  bool add_hit(const Submitters&);

  /// Call this when the slot gets another response.
  void forget_slot(std::uint32_t slot);

  /// Records that these ranks have submitted a join. Operations that they have not submitted do not
  /// wait for them until end_join().
  void add_joined(RankSpan ranks);
  /// Counts the join's waiting time from now, because other ranks are still at work.
  void restart_join_clock(TimePoint now);
  /// Call this when the kJoin leaves the table, after success or failure.
  void end_join() noexcept;
  bool anyone_joined() const noexcept { return !joined_.empty(); }
  const RankSet& joined() const noexcept { return joined_; }
  /// The highest of the ranks that add_joined() was last called for.
  int last_to_join() const noexcept { return last_to_join_; }
  /// Drops all pending operations.
  void clear();
  /// Drops the pending operations of a process set that was removed.
  void drop_set(int process_set);

  /// Whether ready tensors of this sort, with this many bytes in total, continue to gather.
  using KeepGathering = std::function<bool(const FusionSort&, std::int64_t bytes)>;
  /// Tensors that can be planned now, in canonical order, mismatching ones included; they leave the
  /// "ready" state but stay in the table until erase(). A member of a group is held back until its
  /// whole group is complete or one of it has failed.
  ///
  /// If a function is given, tensors that may share a batch continue to gather as long as it
  /// returns true. Groups of several sorts do not, because their members are planned together. A
  /// ready join or removal of a process set ends all gathering, because gathering tensors may
  /// depend on joined ranks or belong to that set.
  std::vector<PendingRef> extract_ready(const KeepGathering& = {});
  bool anything_ready() const noexcept { return !at_once_.empty() || !gathering_.empty(); }
  /// The failure of a member of the same group, which makes this tensor fail too.
  std::optional<Status> group_failure(const PendingTensor&) const;
  /// Fails every later or waiting member of this tensor's group, for this reason.
  void fail_group(const PendingTensor&, const Status& reason);
  void erase(PendingRef);

  /// The pending operation of this name, or null.
  const PendingTensor* find(const wire::Request&) const;
  PendingList& pending() noexcept { return pending_; }
  const PendingList& pending() const noexcept { return pending_; }
  RankSet missing(const PendingTensor&) const;
  /// The ranks that submit it.
  RankSpan members_of(const PendingTensor&) const;
  bool has_reported(const PendingTensor& tensor, int rank) const {
    return hvd::contains(tensor.reported, rank);
  }

 private:
  static std::string key_of(const wire::Request& r) { return tensor_key(r.process_set, r.name); }
  static std::string group_of(const wire::Request& r) {
    return tensor_key(r.process_set, r.group_key());
  }
  void check(const Submitters&, const wire::Request&) const;
  void check_members(const Submitters&, const wire::Request&) const;
  void check_own_members(const Submitters&, const wire::Request&) const;
  PendingRef create(const Submitters&, wire::Request&&, TimePoint now);
  void compare(PendingTensor&, int rank, wire::Request&&);
  void mark(PendingRef, const Submitters&);
  void fill_first_dims(PendingTensor&, const Submitters&, std::int64_t of_request) const;
  std::size_t position_of(const PendingTensor&, int rank) const;
  void mark_absent(PendingRef, const RankSet& ranks);
  void complete(PendingRef);
  void make_ready(PendingRef, bool may_gather);
  void forget_ready(PendingRef);
  void join_group(PendingRef, const Submitters&, const wire::Request&);
  bool replaces_member(const TensorGroup&, const Submitters&, const wire::Request&) const;
  void fail_group(TensorGroup&, const Status& reason);

  const ProcessSetTable& sets_;
  PendingList pending_;
  std::unordered_map<std::string, PendingRef> by_key_;
  /// By slot: the pending tensor that was submitted only by hits on this slot.
  std::vector<std::optional<PendingRef>> by_slot_;
  std::unordered_map<std::string, std::shared_ptr<TensorGroup>> groups_;  // the current use of each
  /// Ready tensors of one sort.
  struct Gathering {
    std::vector<PendingRef> tensors = {};
    std::int64_t bytes = 0;
  };
  std::vector<PendingRef> at_once_;            // ready, to be planned without delay
  std::map<FusionSort, Gathering> gathering_;  // the other ready tensors; no entry is empty
  RankSet joined_;
  int last_to_join_ = 0;
  std::optional<PendingRef> join_;
};

/// Bytes that a tensor adds to a batch, with the contributions of all members; at most kMaxBytes.
std::int64_t batch_bytes(const PendingTensor&);

}  // namespace hvd::control
