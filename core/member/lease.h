#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "base/clock.h"

namespace hvd::member {

/// The permission of an agent to run the ranks of its host, which hvdrun renews. When it expires
/// the agent ends its ranks.
///
/// The permission begins when the agent sends a request that hvdrun answers. For hvdrun it begins
/// when hvdrun receives the request, which is later, so the two need not compare their clocks. When
/// hvdrun has received no request for the deadlines `heartbeat` plus `kill`, no rank of the host
/// runs any more. Pure, not thread-safe.
class Lease {
 public:
  /// @param renewal interval between the agent's requests
  /// @param heartbeat how long an answer is valid
  Lease(Duration renewal, Duration heartbeat, TimePoint now)
      : renewal_(renewal), heartbeat_(heartbeat), asked_(now), since_(now) {}

  /// When the next request is to be sent.
  TimePoint next_request() const noexcept { return asked_ + renewal_; }
  /// Records a request and returns its number.
  std::uint64_t request(TimePoint now) {
    asked_ = now;
    open_.emplace_back(++last_, now);
    return last_;
  }
  /// Records hvdrun's answer to a request.
  void answered(std::uint64_t number) noexcept {
    while (!open_.empty() && open_.front().first <= number) {
      since_ = open_.front().second;
      open_.pop_front();
    }
  }
  TimePoint expiry() const noexcept { return since_ + heartbeat_; }
  bool expired(TimePoint now) const noexcept { return now >= expiry(); }

 private:
  Duration renewal_;
  Duration heartbeat_;
  TimePoint asked_;  ///< when the last request was sent
  TimePoint since_;  ///< when the last request that was answered was sent
  std::uint64_t last_ = 0;
  std::deque<std::pair<std::uint64_t, TimePoint>> open_;  ///< requests without an answer
};

}  // namespace hvd::member
