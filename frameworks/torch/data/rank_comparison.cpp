#include "data/rank_comparison.h"

#include <utility>

#include "hvd/error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {

void require_agreement(const std::string& what, const RankStatement& own, const ProcessSet& set) {
  using Statement = std::pair<std::string, std::string>;
  std::vector<Statement> all;
  if (set.size() > 1) {
    all =
        allgather_object(Statement{own.error, own.description}, {.name = what, .process_set = set});
  }
  if (!own.error.empty()) throw UsageError(own.error);
  const std::vector<int> ranks = set.ranks();
  if (set.size() > 1 && all.size() < ranks.size()) {
    throw MismatchError(what + ": " + std::to_string(ranks.size() - all.size()) + " of " +
                        std::to_string(ranks.size()) +
                        " ranks have called join() and take no part; expected every rank of the "
                        "process set: call it when all ranks have returned from join()");
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].first.empty()) continue;
    throw MismatchError(what + ": rank " + std::to_string(ranks[i]) + " failed: " + all[i].first);
  }
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].second == all[0].second) continue;
    throw MismatchError(what + ": expected the same on every rank, got " + all[0].second +
                        " on rank " + std::to_string(ranks[0]) + " and " + all[i].second +
                        " on rank " + std::to_string(ranks[i]));
  }
}

}  // namespace hvd::libtorch
