#include "sim/tree_world.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hvd::sim {
namespace {

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

control::CoordinatorOptions options(int ranks) {
  control::CoordinatorOptions options;
  options.host_of_rank.assign(index(ranks), "host");
  return options;
}

Topology topology(int ranks, int ranks_per_host) {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < ranks; ++rank)
    hosts.push_back("host" + std::to_string(rank / ranks_per_host));
  return make_topology(0, hosts);
}

void count_accepted(const wire::MergedReport& merged, TreeWorld::Round& round) {
  for (const auto& applied : merged.applied) round.ranges_accepted += applied.ranks.ranges().size();
  for (const auto& section : merged.sections) {
    for (const auto& group : section.groups) {
      round.ranges_accepted += group.ranks.ranges().size();
      round.things_accepted += group.requests.size() + group.unnamed_hits.size();
      for (const auto& hits : group.hits)
        hits.slots.for_each([&](std::uint32_t) { ++round.things_accepted; });
    }
  }
}

}  // namespace

TreeWorld::TreeWorld(int ranks, int ranks_per_host, int radix, int tensors)
    : tensors_(tensors),
      parents_(control::tree_parents(topology(ranks, ranks_per_host), radix)),
      coordinator_(options(ranks), control::ProcessSetTable(ranks)),
      negotiator_(0, control::ProcessSetTable(ranks), options(1).cache_capacity),
      ranks_(index(ranks)) {
  std::vector<int> depths(index(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    for (int above = parents_[index(rank)]; above != -1; above = parents_[index(above)])
      ++depths[index(rank)];
    if (parents_[index(rank)] != -1) ranks_[index(parents_[index(rank)])].children.push_back(rank);
  }
  depth_ = *std::max_element(depths.begin(), depths.end());
  order_.resize(index(ranks));
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return depths[index(a)] > depths[index(b)]; });
  std::vector<RankSet> subtrees(index(ranks));
  for (const int rank : order_) {
    subtrees[index(rank)].add(RankSet(rank));
    if (rank != 0) subtrees[index(parents_[index(rank)])].add(subtrees[index(rank)]);
    if (ranks_[index(rank)].children.empty()) continue;
    ranks_[index(rank)].aggregator = std::make_unique<control::Aggregator>(
        subtrees[index(rank)], negotiator_, std::chrono::seconds(1));
  }
}

wire::Request TreeWorld::request(int number) const {
  wire::Request request;
  request.name = "layer.weight." + std::to_string(number);
  request.shape = {64, 64};
  return request;
}

void TreeWorld::post(int from, wire::Bytes bytes) {
  ranks_[index(parents_[index(from)])].inbox.push_back({from, std::move(bytes)});
}

// Each message is dealt with by itself, as if it had come alone.
template <class PassOn>
void TreeWorld::hear(int rank, const wire::Report& own, PassOn&& pass_on) {
  Rank& self = ranks_[index(rank)];
  const auto take = [&] {
    if (auto merged = self.aggregator->take(now_)) pass_on(std::move(*merged));
  };
  self.aggregator->accept(rank, own, now_);
  take();
  for (const Letter& letter : self.inbox) {
    const bool from_leaf = ranks_[index(letter.from)].aggregator == nullptr;
    // What leaves say is what this rank says; rank 0, whose work is measured, reads it all the
    // same.
    const wire::AnyMessage message =
        from_leaf && rank != 0 ? wire::AnyMessage(own) : wire::decode(letter.bytes);
    if (const auto* merged = std::get_if<wire::MergedReport>(&message)) {
      self.aggregator->accept(*merged, now_);
    } else {
      self.aggregator->accept(letter.from, std::get<wire::Report>(message), now_);
    }
    take();
  }
}

TreeWorld::Round TreeWorld::round(const Watch& watch) {
  for (int i = 0; i < tensors_; ++i) negotiator_.submit(request(i));
  const auto report = negotiator_.take_report();
  if (!report) throw std::runtime_error("tree world: a rank had nothing to say");
  const wire::Bytes bytes = wire::encode(*report);
  Round round;
  round.depth = depth_;
  for (const int rank : order_) {
    Rank& self = ranks_[index(rank)];
    round.most_received = std::max(round.most_received, self.inbox.size() + 1);
    round.most_sent_down = std::max(round.most_sent_down, self.children.size());
    if (rank == 0) {
      decide(*report, round, watch);
    } else if (self.aggregator == nullptr) {
      post(rank, bytes);
    } else {
      hear(rank, *report,
           [&](const wire::MergedReport& merged) { post(rank, wire::encode(merged)); });
    }
    self.inbox.clear();
  }
  const control::Applied applied = negotiator_.apply(round.plan);
  std::size_t agreed = 0;
  for (const auto& batch : applied.batches) agreed += batch.operations.size();
  if (agreed != index(tensors_) || !applied.errors.empty()) {
    throw std::runtime_error("tree world: a plan for " + std::to_string(agreed) + " of " +
                             std::to_string(tensors_) + " tensors");
  }
  for (Rank& self : ranks_) {
    if (self.aggregator != nullptr) self.aggregator->note_plan(round.plan);
  }
  return round;
}

void TreeWorld::decide(const wire::Report& own, Round& round, const Watch& watch) {
  const std::vector<Letter>& inbox = ranks_[0].inbox;
  round.root_received = inbox.size() + 1;
  round.merged_bytes = inbox.back().bytes.size();
  std::vector<wire::MergedReport> passed;
  watch.begin();
  hear(0, own, [&](wire::MergedReport merged) {
    coordinator_.accept(merged, now_);
    passed.push_back(std::move(merged));
  });
  watch.accepted();
  const auto plan = coordinator_.decide_encoded(now_, 0);
  watch.decided();
  if (!plan) throw std::runtime_error("tree world: all ranks have reported and there is no plan");
  round.plan_bytes = plan->size();
  round.plan = std::get<wire::Plan>(wire::decode(*plan));
  for (const auto& merged : passed) count_accepted(merged, round);
}

}  // namespace hvd::sim
