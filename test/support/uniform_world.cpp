#include "support/uniform_world.h"

#include <algorithm>
#include <cstdlib>
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

void count_accepted(const wire::Report& merged, UniformWorld::Round& round) {
  for (const auto& applied : merged.applied) round.ranges_accepted += applied.ranks.ranges().size();
  for (const auto& section : merged.sections) {
    for (const auto& group : section.groups) {
      round.ranges_accepted += group.ranks.ranges().size();
      round.items_accepted += group.requests.size() + group.unnamed_hits.size();
      for (const auto& hits : group.hits)
        hits.slots.for_each([&](std::uint32_t) { ++round.items_accepted; });
    }
  }
}

// glibc's malloc merges the small chunks that were freed when a larger one is allocated next. Here
// these are the chunks of all simulated ranks, which rank 0 of a job does not have.
void merge_freed_chunks() {
  void* const volatile large = std::malloc(std::size_t{1} << 16);  // volatile keeps it
  std::free(large);
}

// Returns the report with `rank` as its sender.
wire::Report sent_by(int rank, wire::Report report) {
  const RankSet sender(rank);
  report.applied[0].ranks = sender;
  for (auto& section : report.sections) section.groups[0].ranks = sender;
  return report;
}

}  // namespace

UniformWorld::UniformWorld(int ranks, int ranks_per_host, int radix, int tensors)
    : tensors_(tensors),
      inboxes_(rank_index(ranks)),
      world_({.coordinator = {.host_of_rank = hosts_of_ranks(ranks, ranks_per_host)},
              .radix = radix,
              .alike = true,
              .on_merged =
                  [this](int rank, wire::Report&& merged) {
                    if (rank == 0) accepted_.push_back(std::move(merged));
                  }},
             [this](int, int to, wire::Bytes bytes) {
               inboxes_[rank_index(to)].push_back(std::move(bytes));
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
  // Without a tree all ranks report to rank 0. It is last, because it decides after all reports.
  if (radix == 0) std::rotate(order_.begin(), order_.begin() + 1, order_.end());
}

// Accepts each message separately, as if it had arrived alone.
void UniformWorld::accept_reports(int rank, const wire::Report& report) {
  if (world_.aggregator(rank)) world_.accept(rank, sent_by(rank, report), now_);
  for (const wire::Bytes& bytes : inboxes_[rank_index(rank)]) world_.receive(rank, bytes, now_);
}

UniformWorld::Round UniformWorld::round(const Watch& watch) {
  control::Negotiator& negotiator = world_.negotiator(0);
  for (int i = 0; i < tensors_; ++i) negotiator.submit(request(i));
  const auto report = negotiator.next_report();
  if (!report) throw std::runtime_error("simulated world: a rank had no report");
  Round round;
  round.depth = depth_;
  if (!world_.aggregator(0)) inboxes_[0].push_back(wire::encode(*report));
  for (const int rank : order_) {
    const bool inner = world_.aggregator(rank).has_value();
    const std::size_t received = inboxes_[rank_index(rank)].size() + (inner || rank != 0 ? 1 : 0);
    round.max_received = std::max(round.max_received, received);
    round.max_sent_down = std::max(round.max_sent_down, world_.place(rank).children.size());
    if (rank == 0) {
      round.root_received = received;
      decide(*report, round, watch);
    } else if (inner) {
      accept_reports(rank, *report);
    } else {
      inboxes_[rank_index(std::max(world_.place(rank).parent, 0))].push_back(
          wire::encode(sent_by(rank, *report)));
    }
    inboxes_[rank_index(rank)].clear();
  }
  apply(round.plan);
  return round;
}

void UniformWorld::decide(const wire::Report& report, Round& round, const Watch& watch) {
  round.report_bytes = inboxes_[0].back().size();
  accepted_.clear();
  merge_freed_chunks();
  watch.begin();
  accept_reports(0, report);
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
