#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "elastic/member_link.h"
#include "elastic/snapshot.h"
#include "hvd/elastic.h"

namespace hvd::elastic {

struct State::Impl {
  /// The bytes of the copied items at a commit.
  struct Commit {
    std::vector<std::byte> replicated = {};  ///< equal on all ranks
    std::vector<std::byte> own = {};         ///< of this rank
  };

  std::vector<Item> items = {};
  std::vector<std::function<void(const Change&)>> callbacks = {};
  Commit committed = {};  ///< the last commit
  Commit spare = {};      ///< memory for the next commit
  std::uint64_t commits = 0;
  bool has_state = false;                                ///< `committed` is a whole commit
  bool running = false;                                  ///< run() is in its function
  MemberLink* link = nullptr;                            ///< in an elastic job, in run()
  mutable std::optional<std::uint64_t> known_hash = {};  ///< of committed.replicated

  /// Prepares the next commit. If that fails at the commit of a change of the members, this rank
  /// leaves the generation with the previous commit, and does not report a failure, because every
  /// member leaves the generation.
  void prepare(bool goes_on) const;
  /// Makes memory for a commit resident, so that a state arrives without page faults.
  void reserve();
  /// Copies the current state to the last commit.
  void save_commit();
  /// Forgets the last commit: this rank then has no state.
  void lose();
  /// The hash of the last commit's replicated part, which is computed once.
  std::uint64_t committed_hash() const;
  /// Restores the copied items from the last commit.
  void restore_commit() const;
  /// Notifies all items that the current state is that of the last commit.
  void confirm() const;
  member::StateSummary summary() const;
  /// Whether each rank has a part of the state that the others do not have.
  bool divided() const;
};

}  // namespace hvd::elastic
