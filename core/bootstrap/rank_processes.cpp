#include "bootstrap/rank_processes.h"

#include <chrono>

namespace hvd::rendezvous {
namespace {

/// So long nobody asks whether the rank that is waited for has ended.
constexpr auto kTimeToBeLate = std::chrono::milliseconds(50);

}  // namespace

void RankProcesses::add(const Arrival& arrival) {
  const int rank = arrival.introduction.rank;
  if (!known_.contains(rank)) known_.emplace(rank, Known{arrival, watch(arrival)});
}

bool RankProcesses::has_ended(int rank) {
  const auto found = known_.find(rank);
  return found != known_.end() && found->second.process.ended();
}

const Arrival* RankProcesses::any_ended() {
  for (auto& [rank, known] : known_)
    if (known.process.ended()) return &known.arrival;
  return nullptr;
}

/// One look of a wait that has become long.
std::optional<Bytes> RankProcesses::look(int rank, const Place& place) {
  if (auto found = look_for(place.value, place.failure)) return found;
  if (!known_.contains(rank)) {
    const auto come = decode_arrival(place.arrival().value_or(Bytes()));
    if (come && come->introduction.rank == rank) add(*come);
  }
  if (!has_ended(rank)) return std::nullopt;
  auto found = look_for(place.value, place.failure);  // as they may have come before the end
  if (!found) ended(known_.at(rank).arrival, place_, {}).raise();
  return found;
}

std::optional<Bytes> RankProcesses::wait(
    int rank, const Place& place, const std::function<void(const std::function<bool()>&)>& repeat) {
  std::optional<Bytes> value;
  const auto late = std::chrono::steady_clock::now() + kTimeToBeLate;
  repeat([&] {
    value = std::chrono::steady_clock::now() < late ? look_for(place.value, place.failure)
                                                    : look(rank, place);
    return value.has_value();
  });
  return value;
}

}  // namespace hvd::rendezvous
