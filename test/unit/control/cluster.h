#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/coordinator.h"
#include "control/negotiator.h"

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

/// "t7".
inline std::string numbered(std::string prefix, std::uint64_t number) {
  return prefix += std::to_string(number);
}

/// Negotiators and a coordinator, joined by hand: a test says when a report is sent, when it
/// arrives, and when a plan is applied.
class Cluster {
 public:
  explicit Cluster(int ranks, CoordinatorOptions options = {}) : sets_(ranks) {
    options.host_of_rank.clear();
    for (int rank = 0; rank < ranks; ++rank)
      options.host_of_rank.push_back(numbered("host", static_cast<std::uint64_t>(rank)));
    for (int rank = 0; rank < ranks; ++rank) {
      negotiators_.push_back(std::make_unique<Negotiator>(rank, sets_, options.cache_capacity));
    }
    next_plan_.resize(static_cast<std::size_t>(ranks));
    coordinator_ = std::make_unique<Coordinator>(std::move(options), sets_);
  }

  int size() const { return static_cast<int>(negotiators_.size()); }
  Negotiator& rank(int number) { return *negotiators_[static_cast<std::size_t>(number)]; }
  Coordinator& coordinator() { return *coordinator_; }
  TimePoint now{};

  std::optional<wire::ErrorEntry> submit(int number, wire::Request request) {
    return rank(number).submit(std::move(request));
  }
  void submit_everywhere(const wire::Request& request) {
    for (int number = 0; number < size(); ++number) submit(number, request);
  }

  /// A rank's news, encoded; empty when it has none.
  wire::Bytes send(int number) {
    const auto report = rank(number).take_report();
    return report ? wire::encode(*report) : wire::Bytes{};
  }
  void arrive(int number, const wire::Bytes& bytes) {
    if (!bytes.empty())
      coordinator_->accept(number, std::get<wire::Report>(wire::decode(bytes)), now);
  }
  void report(int number) { arrive(number, send(number)); }
  void report_all() {
    for (int number = 0; number < size(); ++number) report(number);
  }

  std::optional<wire::Plan> decide(std::size_t in_flight = 0) {
    const auto plan = coordinator_->decide(now, in_flight);
    if (!plan) return std::nullopt;
    plans_.push_back(std::get<wire::Plan>(wire::decode(wire::encode(*plan))));
    return plans_.back();
  }
  /// The next plan that this rank has not applied.
  Applied apply(int number) {
    return rank(number).apply(plans_.at(next_plan_[static_cast<std::size_t>(number)]++));
  }
  std::vector<Applied> apply_everywhere() {
    std::vector<Applied> applied;
    for (int number = 0; number < size(); ++number) applied.push_back(apply(number));
    return applied;
  }
  /// All that is submitted goes to the coordinator, and what it decides comes back.
  std::vector<Applied> exchange() {
    report_all();
    return decide() ? apply_everywhere() : std::vector<Applied>(negotiators_.size());
  }

 private:
  ProcessSetTable sets_;
  std::vector<std::unique_ptr<Negotiator>> negotiators_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<wire::Plan> plans_;
  std::vector<std::size_t> next_plan_;
};

/// The error a rank was told for an operation, or "".
inline std::string told(const Applied& applied, const std::string& name) {
  for (const auto& error : applied.errors) {
    if (error.name == name) return error.message;
  }
  return "";
}

}  // namespace hvd::control
