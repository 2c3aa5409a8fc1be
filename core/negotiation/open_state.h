#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>

#include "negotiation/held_reports.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

/// Whether an aggregator is open, so that everything goes on as it comes, and what keeps it open:
/// operations that went on in parts, a join, a rank that leaves. See Note [What is held back] in
/// aggregator.cpp. Pure; not thread-safe.
class OpenState {
 public:
  /// @param cache of this rank; it outlives the object
  explicit OpenState(const ResponseCache& cache) noexcept : cache_(cache) {}

  bool open() const noexcept { return open_; }
  /// From now on, until close_if_done().
  void set_open() noexcept { open_ = true; }
  /// Nothing is held: closes, unless something keeps it open.
  void close_if_done() noexcept;
  /// A rank wants to leave: open until the next replay.
  void note_leaving() noexcept { open_ = anyone_left_ = true; }

  /// A rank has joined: open until a plan has ended the join.
  /// @param name of the operation
  void note_joining(const std::string& name);
  bool joining() const noexcept { return joining_; }

  /// These went on before all had asked for them: open until plans have ended each.
  /// @param as_of the plan that the slots refer to the cache of
  /// @param last_applied the last plan
  void remember(const HeldReports::InParts&, std::uint64_t as_of, std::uint64_t last_applied);
  /// The plan ends operations. The cache is as of this plan.
  void note_plan(const wire::Plan&);
  /// The plan has put other responses into some slots.
  void follow_displaced(std::uint64_t plan);
  void drop_removed(const ProcessSetTable&);
  /// Whatever was asked for is asked for again.
  void reset();

 private:
  void forget(int process_set, const std::string& name, std::uint64_t as_of);
  void forget(const wire::PlannedTensor&, std::uint64_t as_of);
  bool in_parts() const noexcept { return !slots_.empty() || !keys_.empty(); }

  const ResponseCache& cache_;
  bool open_ = false;
  bool anyone_left_ = false;
  bool joining_ = false;  ///< no plan has ended it yet
  std::string join_name_;
  // What went on in parts, and no plan has ended yet.
  wire::SlotSet slots_;
  std::unordered_set<std::string> keys_;  // tensor_key()
  std::uint64_t remembered_at_ = 0;       ///< the last plan then
};

}  // namespace hvd::control
