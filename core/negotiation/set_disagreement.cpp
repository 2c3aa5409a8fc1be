#include "negotiation/set_disagreement.h"

#include <algorithm>
#include <string_view>

#include "base/text.h"
#include "negotiation/process_set_table.h"

namespace hvd::control {
namespace {

/// A set that the search has reached from another set, which waits for it.
struct Reached {
  PendingRef set = {};
  std::size_t from = 0;  ///< index of the other set
  int rank = 0;          ///< missing from the other set, because it makes this one
};

// The name that the program gave to the set: name_by_members() adds a word.
std::string_view name_of_set(const PendingTensor& tensor) {
  const std::string_view name = tensor.request.name;
  const auto end = name.rfind(' ');
  return name.substr(0, end == std::string_view::npos ? 0 : end);
}

std::string text_of(const std::vector<Reached>& cycle) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    const Reached& next = cycle[(i + 1) % cycle.size()];
    parts.push_back(text("rank ", next.rank, " makes ", members_text(next.set->request.new_set),
                         " and not ", members_text(cycle[i].set->request.new_set)));
  }
  return text("its members disagree and wait for each other: ", join_text(parts, ", "),
              "; every member must pass the same ranks and make the sets of one name in the same "
              "order");
}

}  // namespace

std::optional<SetDisagreement> find_disagreement(ReadyTable& table, PendingRef last) {
  std::vector<PendingRef> unreached;
  for (PendingRef tensor = table.pending().begin(); tensor != table.pending().end(); ++tensor) {
    if (tensor->request.by_members() && tensor->missing > 0 &&
        name_of_set(*tensor) == name_of_set(*last))
      unreached.push_back(tensor);
  }
  std::vector<Reached> reached = {{last}};
  for (std::size_t next = 0; next < reached.size(); ++next) {
    const RankSet missing = table.missing(*reached[next].set);
    const RankSet makes_last = intersection(missing, last->reported);
    if (!makes_last.empty()) {
      std::vector<Reached> cycle;
      for (std::size_t i = next; i != 0; i = reached[i].from) cycle.push_back(reached[i]);
      cycle.push_back({last, 0, makes_last.lowest()});
      std::ranges::reverse(cycle);
      SetDisagreement found{{}, text_of(cycle)};
      for (const Reached& one : cycle) found.sets.push_back(one.set);
      return found;
    }
    std::erase_if(unreached, [&](PendingRef tensor) {
      const RankSet makes_it = intersection(missing, tensor->reported);
      if (makes_it.empty()) return false;
      reached.push_back({tensor, next, makes_it.lowest()});
      return true;
    });
  }
  return std::nullopt;
}

}  // namespace hvd::control
