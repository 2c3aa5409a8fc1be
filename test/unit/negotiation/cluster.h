#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/control_world.h"
#include "unit/negotiation/golden.h"

namespace hvd::control {

inline wire::Request allreduce(std::string name, std::vector<std::int64_t> shape = {4}) {
  wire::Request request;
  request.name = std::move(name);
  request.shape = std::move(shape);
  return request;
}

inline wire::Request allgather(std::string name, std::vector<std::int64_t> shape) {
  wire::Request request = allreduce(std::move(name), std::move(shape));
  request.kind = OpKind::kAllgather;
  return request;
}

inline wire::Request unnamed(OpKind kind, std::uint64_t ordinal,
                             std::vector<std::int64_t> shape = {4}) {
  wire::Request request = allreduce(wire::unnamed_name(kind, ordinal), std::move(shape));
  request.kind = kind;
  request.unnamed = true;
  request.ordinal = ordinal;
  return request;
}

inline wire::Request in_group(wire::Request request, std::string group, int size, int index) {
  request.group = std::move(group);
  request.group_size = size;
  request.group_index = index;
  return request;
}

/// For example "t7".
inline std::string numbered(std::string prefix, std::uint64_t number) {
  return prefix += std::to_string(number);
}

using wire::golden::make_report;
using wire::golden::rank_report;
using wire::golden::RankReport;

/// A world without a tree, in which the test decides when a report is sent, when it arrives, and
/// when a plan is applied.
class Cluster {
 public:
  explicit Cluster(int ranks, CoordinatorOptions options = {})
      : world_({.coordinator = with_hosts(std::move(options), ranks)},
               [this](int, int, wire::Bytes bytes) { sent_ = std::move(bytes); }),
        next_plan_(static_cast<std::size_t>(ranks)) {}

  int size() const { return world_.size(); }
  Negotiator& rank(int number) { return world_.negotiator(number); }
  Coordinator& coordinator() { return world_.coordinator(); }
  TimePoint now{};

  std::optional<wire::ErrorEntry> submit(int number, wire::Request request) {
    return rank(number).submit(std::move(request));
  }
  void submit_everywhere(const wire::Request& request) {
    for (int number = 0; number < size(); ++number) submit(number, request);
  }

  /// A rank's report, encoded; empty when it has none.
  wire::Bytes send(int number) {
    world_.report(number, now);
    return std::exchange(sent_, {});
  }
  void arrive(const wire::Bytes& bytes) {
    if (!bytes.empty()) world_.receive(0, bytes, now);
  }
  void report(int number) { arrive(send(number)); }
  void report_all() {
    for (int number = 0; number < size(); ++number) report(number);
  }

  /// @param in_flight the number of batches in flight on each channel
  std::optional<wire::Plan> decide(std::size_t in_flight = 0) {
    const auto plan = coordinator().decide(now, [=](int, DeviceType) { return in_flight; });
    if (!plan) return std::nullopt;
    plans_.push_back(std::get<wire::Plan>(wire::decode(wire::encode(*plan))));
    return plans_.back();
  }
  /// Applies the next plan that this rank has not applied yet.
  Applied apply(int number) {
    return world_.apply(number, plans_.at(next_plan_[static_cast<std::size_t>(number)]++));
  }
  std::vector<Applied> apply_everywhere() {
    std::vector<Applied> applied;
    for (int number = 0; number < size(); ++number) applied.push_back(apply(number));
    return applied;
  }
  /// All ranks report, and apply the plan that the coordinator decides.
  std::vector<Applied> exchange() {
    report_all();
    return decide() ? apply_everywhere() : std::vector<Applied>(next_plan_.size());
  }

 private:
  static CoordinatorOptions with_hosts(CoordinatorOptions options, int ranks) {
    options.host_of_rank = testing::hosts_of_ranks(ranks, 1);
    return options;
  }

  wire::Bytes sent_;
  testing::ControlWorld world_;
  std::vector<wire::Plan> plans_;
  std::vector<std::size_t> next_plan_;
};

/// The error text that a rank gets for an operation, or "".
inline std::string error_of(const Applied& applied, const std::string& name) {
  for (const auto& error : applied.errors) {
    if (error.name == name) return error.message;
  }
  return "";
}

}  // namespace hvd::control
