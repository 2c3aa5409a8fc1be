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
  std::vector<Item> items = {};
  std::vector<std::function<void(const Change&)>> callbacks = {};
  std::vector<std::byte> committed = {};  ///< of the last commit
  std::vector<std::byte> spare = {};      ///< its memory takes the next commit
  std::uint64_t commits = 0;
  bool has_state = false;                                ///< `committed` is a whole commit
  bool running = false;                                  ///< run() is in its function
  MemberLink* link = nullptr;                            ///< in an elastic job, in run()
  mutable std::optional<std::uint64_t> known_hash = {};  ///< of `committed`

  /// Copies the present state as the last commit.
  void take();
  /// The hash of the last commit, which is computed once.
  std::uint64_t committed_hash() const;
  member::StateSummary summary() const;
};

}  // namespace hvd::elastic
