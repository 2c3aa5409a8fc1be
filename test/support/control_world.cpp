#include "support/control_world.h"

#include <algorithm>
#include <utility>

namespace hvd::testing {
namespace {

// Returns the place of each rank like place_in_tree(), but faster, because that function visits all
// ranks each time.
std::vector<control::TreePlace> places_of(const std::vector<int>& parents) {
  std::vector<control::TreePlace> places(parents.size());
  for (std::size_t rank = 0; rank < parents.size(); ++rank) {
    places[rank].parent = parents[rank];
    if (parents[rank] != -1)
      places[rank_index(parents[rank])].children.push_back(static_cast<int>(rank));
    for (auto above = static_cast<int>(rank); above != -1; above = parents[rank_index(above)]) {
      const auto number = static_cast<int>(rank);
      places[rank_index(above)].subtree.append({number, number});
    }
  }
  return places;
}

std::vector<control::TreePlace> places_of(const ControlWorld::Options& options) {
  const Topology topology = make_topology(0, options.coordinator.host_of_rank);
  std::vector<control::TreePlace> places(rank_index(topology.size));
  if (options.radix == 0) return places;
  if (options.alike) return places_of(control::tree_parents(topology, options.radix));
  for (int rank = 0; rank < topology.size; ++rank)
    places[rank_index(rank)] = control::place_in_tree(topology, rank, options.radix);
  return places;
}

}  // namespace

ControlWorld::ControlWorld(Options options, Send send)
    : options_(std::move(options)),
      send_(std::move(send)),
      coordinator_(
          options_.coordinator,
          control::ProcessSetTable(static_cast<int>(options_.coordinator.host_of_rank.size()))) {
  std::vector<control::TreePlace> places = places_of(options_);
  const control::ProcessSetTable sets(static_cast<int>(places.size()));
  ranks_ = std::vector<Rank>(places.size());  // sized once: aggregators cannot move
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto rank = static_cast<int>(i);
    if (rank == 0 || !options_.alike) {
      negotiators_.push_back(
          std::make_unique<control::Negotiator>(rank, sets, options_.coordinator.cache_capacity));
    }
    ranks_[i].place = std::move(places[i]);
    if (!ranks_[i].place.children.empty())
      ranks_[i].aggregator.emplace(ranks_[i].place.subtree, negotiator(rank),
                                   options_.longest_hold);
  }
}

bool ControlWorld::report(int rank, TimePoint now) {
  const auto report = negotiator(rank).next_report();
  if (!report) return false;
  if (at(rank).aggregator) return accept(rank, *report, now);
  send_(rank, std::max(place(rank).parent, 0), wire::encode(*report));
  return false;
}

bool ControlWorld::receive(int to, const wire::Bytes& bytes, TimePoint now) {
  const auto& aggregator = at(to).aggregator;
  const auto known = aggregator ? aggregator->known_items() : std::span<const std::byte>();
  return accept(to, wire::decode(bytes, known), now);
}

bool ControlWorld::accept(int to, wire::AnyMessage message, TimePoint now) {
  auto& aggregator = at(to).aggregator;
  auto& report = std::get<wire::Report>(message);
  if (aggregator) {
    aggregator->accept(std::move(report), now);
    return forward(to, now);
  }
  coordinator_.accept(report, now);
  return true;
}

bool ControlWorld::forward(int rank, TimePoint now) {
  auto merged = at(rank).aggregator.value().next_report(now);
  if (!merged) return false;
  if (rank == 0) {
    coordinator_.accept(*merged, now);
  } else {
    send_(rank, place(rank).parent, wire::encode(*merged));
  }
  if (options_.on_merged) options_.on_merged(rank, std::move(*merged));
  return rank == 0;
}

control::Applied ControlWorld::apply(int rank, const wire::Plan& plan) {
  control::Applied applied = negotiator(rank).apply(plan);
  const auto apply_to = [&plan](Rank& of) {
    if (of.aggregator) of.aggregator->apply(plan);
  };
  if (options_.alike) {
    std::for_each(ranks_.begin(), ranks_.end(), apply_to);
  } else {
    apply_to(at(rank));
  }
  return applied;
}

std::vector<std::string> hosts_of_ranks(int ranks, int ranks_per_host) {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < ranks; ++rank)
    hosts.push_back("host" + std::to_string(rank / ranks_per_host));
  return hosts;
}

}  // namespace hvd::testing
