#include "support/uniform_world.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace hvd::testing {
namespace {

wire::Request request(int number) {
  wire::Request request;
  request.name = "layer.weight." + std::to_string(number);
  request.shape = {64, 64};
  return request;
}

void count_accepted(const wire::MergedReport& merged, UniformWorld::Round& round) {
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

UniformWorld::UniformWorld(int ranks, int ranks_per_host, int radix, int tensors)
    : tensors_(tensors),
      inboxes_(rank_index(ranks)),
      world_({.coordinator = {.host_of_rank = hosts_of_ranks(ranks, ranks_per_host)},
              .radix = radix,
              .alike = true,
              .on_merged =
                  [this](int rank, wire::MergedReport&& merged) {
                    if (rank == 0) accepted_.push_back(std::move(merged));
                  }},
             [this](int from, int to, wire::Bytes bytes) {
               inboxes_[rank_index(to)].push_back(
                   {from, std::make_shared<const wire::Bytes>(std::move(bytes))});
             }),
      order_(rank_index(ranks)) {
  std::vector<int> depths(rank_index(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    for (int above = world_.place(rank).parent; above != -1; above = world_.place(above).parent)
      ++depths[rank_index(rank)];
  }
  depth_ = *std::max_element(depths.begin(), depths.end());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return depths[rank_index(a)] > depths[rank_index(b)]; });
  // Without a tree all are at the root; rank 0 decides when all have spoken.
  if (radix == 0) std::rotate(order_.begin(), order_.begin() + 1, order_.end());
}

// Each message is dealt with by itself, as if it had come alone.
void UniformWorld::hear(int rank, const wire::AnyMessage& own) {
  if (world_.aggregator(rank)) world_.take_in(rank, rank, own, now_);
  for (const Letter& letter : inboxes_[rank_index(rank)]) {
    // What leaves say is what this rank says; rank 0, whose work is measured, reads it all the
    // same.
    if (rank != 0 && !world_.aggregator(letter.from)) {
      world_.take_in(letter.from, rank, own, now_);
    } else {
      world_.receive(letter.from, rank, *letter.bytes, now_);
    }
  }
}

UniformWorld::Round UniformWorld::round(const Watch& watch) {
  control::Negotiator& negotiator = world_.negotiator(0);
  for (int i = 0; i < tensors_; ++i) negotiator.submit(request(i));
  const auto report = negotiator.take_report();
  if (!report) throw std::runtime_error("simulated world: a rank had nothing to say");
  const wire::AnyMessage own = *report;
  const auto bytes = std::make_shared<const wire::Bytes>(wire::encode(*report));
  Round round;
  round.depth = depth_;
  if (!world_.aggregator(0)) inboxes_[0].push_back({0, bytes});
  for (const int rank : order_) {
    const bool inner = world_.aggregator(rank).has_value();
    const std::size_t received = inboxes_[rank_index(rank)].size() + (inner || rank != 0 ? 1 : 0);
    round.most_received = std::max(round.most_received, received);
    round.most_sent_down = std::max(round.most_sent_down, world_.place(rank).children.size());
    if (rank == 0) {
      round.root_received = received;
      decide(own, round, watch);
    } else if (inner) {
      hear(rank, own);
    } else {
      inboxes_[rank_index(std::max(world_.place(rank).parent, 0))].push_back({rank, bytes});
    }
    inboxes_[rank_index(rank)].clear();
  }
  apply(round.plan);
  return round;
}

void UniformWorld::decide(const wire::AnyMessage& own, Round& round, const Watch& watch) {
  round.report_bytes = inboxes_[0].back().bytes->size();
  accepted_.clear();
  watch.begin();
  hear(0, own);
  watch.accepted();
  const auto plan = world_.coordinator().decide(now_, {});
  if (!plan)
    throw std::runtime_error("simulated world: all ranks have reported and there is no plan");
  const wire::Bytes bytes = world_.coordinator().encode(*plan);
  watch.decided();
  round.plan_bytes = bytes.size();
  round.plan = std::get<wire::Plan>(wire::decode(bytes));
  for (const auto& merged : accepted_) count_accepted(merged, round);
}

void UniformWorld::apply(const wire::Plan& plan) {
  const control::Applied applied = world_.apply(0, plan);  // of all
  std::size_t agreed = 0;
  for (const auto& batch : applied.batches) agreed += batch.operations.size();
  if (agreed != rank_index(tensors_) || !applied.errors.empty()) {
    throw std::runtime_error("simulated world: a plan for " + std::to_string(agreed) + " of " +
                             std::to_string(tensors_) + " tensors");
  }
}

}  // namespace hvd::testing
