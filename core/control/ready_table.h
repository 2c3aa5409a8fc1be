#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "control/process_set_table.h"
#include "wire/messages.h"

namespace hvd::control {

/// An operation that some, not yet all, members of its set have asked for (or whose group is not complete).
struct PendingTensor {
  wire::Request request = {};  ///< as `reference_rank` asked
  int reference_rank = 0;
  std::vector<bool> reported = {};            ///< per position in the set
  int missing = 0;                            ///< members that have not reported
  std::vector<std::int64_t> first_dims = {};  ///< allgather: per position
  std::optional<std::string> mismatch = {};   ///< the first disagreement found
  std::optional<std::uint32_t> cached_slot = {};  ///< set when every report so far was a hit on this slot
  TimePoint first_seen{};
  /// When the lowest-ranked member that has reported did so, counted in that rank's own submissions: equal in every run,
  /// whatever the ranks' relative speed.
  std::uint64_t order = 0;
  int order_position = 0;
  bool warned = false;
};

/// A report that came as a cache hit rather than in full.
struct CacheHit {
  std::uint32_t slot = 0;
  const std::vector<std::int64_t>* first_dims = nullptr;  ///< the entry's: what every rank that hits means
};

using PendingList = std::list<PendingTensor>;  // oldest first
using PendingRef = PendingList::iterator;

/// Who has asked for what. Coordinator only; pure; not thread-safe.
class ReadyTable {
 public:
  explicit ReadyTable(const ProcessSetTable& sets, int world_size);

  /// Notes that `rank` asks for `request`. Asking twice for a name that is still pending is a broken peer: throws hvd::Error.
  /// @return the tensor, which may now be complete
  PendingRef add(int rank, wire::Request request, const std::optional<CacheHit>& hit, TimePoint now);
  /// The cheap way for a hit on a slot whose tensor is already pending by hits only; false when it is not so and add() has to do it.
  bool add_hit(int rank, std::uint32_t slot);

  /// The slot holds something else from now on.
  void forget_slot(std::uint32_t slot);

  /// Tensors that can be planned now, in canonical order, mismatching ones included; they leave the "ready" state but stay in the
  /// table until erase(). A member of a group is held back until its whole group is complete or one of it has failed.
  std::vector<PendingRef> take_ready();
  bool anything_ready() const noexcept { return !ready_.empty(); }
  std::int64_t ready_bytes() const noexcept { return ready_bytes_; }
  /// Why a sibling in the group makes this tensor fail, if one does.
  std::optional<std::string> group_failure(const PendingTensor&) const;
  /// Every later or waiting member of this tensor's group fails too, for this reason.
  void fail_group(const PendingTensor&, const std::string& reason);
  void erase(PendingRef);

  PendingList& pending() noexcept { return pending_; }
  const PendingList& pending() const noexcept { return pending_; }
  std::vector<int> missing_ranks(const PendingTensor&) const;

 private:
  struct Group {
    int open = 0;      ///< members in the table
    int complete = 0;  ///< of those, asked for by all
    std::vector<PendingRef> held = {};
    std::optional<std::string> failure = {};
  };
  static std::string key_of(const wire::Request& r) { return std::to_string(r.process_set) + '/' + r.name; }
  static std::string group_of(const wire::Request& r) { return std::to_string(r.process_set) + '/' + r.group_key(); }
  PendingRef create(int rank, int position, wire::Request&&, const std::optional<CacheHit>&, TimePoint now);
  void mark(PendingRef, int rank, int position);
  void note_order(PendingTensor&, int rank, int position);
  void complete(PendingRef);
  void make_ready(PendingRef);

  const ProcessSetTable& sets_;
  PendingList pending_;
  std::unordered_map<std::string, PendingRef> by_key_;
  std::unordered_map<std::uint32_t, PendingRef> by_slot_;
  std::unordered_map<std::string, Group> groups_;
  std::vector<PendingRef> ready_;
  std::int64_t ready_bytes_ = 0;
  std::vector<std::uint64_t> submissions_;  // per world rank
};

/// Bytes a tensor adds to a batch, over what all members contribute.
std::int64_t batch_bytes(const PendingTensor&);

}  // namespace hvd::control
