#include "member/regroup.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

#include "base/expect.h"

namespace hvd::member {
namespace {

/// Puts the entrants into the order of their ranks.
void order(std::vector<Entrant>& entrants) {
  std::map<std::string, std::uint64_t> first_of_host;
  for (const Entrant& entrant : entrants) {
    const auto [host, added] = first_of_host.try_emplace(entrant.host, entrant.serial);
    if (!added) host->second = std::min(host->second, entrant.serial);
  }
  std::sort(entrants.begin(), entrants.end(), [&](const Entrant& a, const Entrant& b) {
    return std::tuple(first_of_host.at(a.host), a.serial) <
           std::tuple(first_of_host.at(b.host), b.serial);
  });
}

bool better(const StateSummary& a, const StateSummary& b) {
  if ((a.kind == StateKind::kNone) != (b.kind == StateKind::kNone))
    return b.kind == StateKind::kNone;
  return std::tuple(a.commit, a.kind) > std::tuple(b.commit, b.kind);
}

/// The index of the root. @param entrants by rank
std::size_t find_root(const std::vector<Entrant>& entrants) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < entrants.size(); ++i)
    if (better(entrants[i].state, entrants[best].state)) best = i;
  if (entrants[best].state.kind != StateKind::kWhole) return best;
  std::map<std::uint64_t, int> holders;
  const auto alike = [&](const StateSummary& state) {
    return state.kind == StateKind::kWhole && state.commit == entrants[best].state.commit;
  };
  for (const Entrant& entrant : entrants)
    if (alike(entrant.state)) ++holders[entrant.state.hash];
  std::size_t root = best;
  for (std::size_t i = 0; i < entrants.size(); ++i) {
    const StateSummary& state = entrants[i].state;
    if (alike(state) && holders[state.hash] > holders[entrants[root].state.hash]) root = i;
  }
  return root;
}

}  // namespace

std::optional<Regroup> regroup(Generation generation, std::vector<Entrant> entrants, bool first) {
  HVD_EXPECT(!entrants.empty(), "there is an entrant");
  order(entrants);
  const std::size_t root = find_root(entrants);
  const StateSummary state = entrants[root].state;
  Regroup result;
  Assign& assign = result.assign;
  assign.generation = generation;
  assign.load = state.kind == StateKind::kNone;
  if (assign.load && !first && !entrants.front().can_load) return std::nullopt;
  assign.root = assign.load ? 0 : static_cast<std::uint32_t>(root);
  assign.state = state;
  result.touched = state.kind == StateKind::kTouched;
  for (std::size_t i = 0; i < entrants.size(); ++i) {
    Entrant& entrant = entrants[i];
    const bool has = state.kind == StateKind::kWhole && entrant.state == state;
    if (entrant.state.kind == StateKind::kWhole && state.kind == StateKind::kWhole && !has &&
        entrant.state.commit == state.commit)
      result.differed.push_back(entrant.worker);
    assign.seats.push_back({.worker = entrant.worker,
                            .receives = !has && i != assign.root,
                            .address = std::move(entrant.address)});
  }
  return result;
}

}  // namespace hvd::member
