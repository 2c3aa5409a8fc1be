#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace hvd::launcher {

/// Keeps the earlier of two times, of which either may be missing.
inline void keep_earlier(std::optional<Deadline>& time, const std::optional<Deadline>& other) {
  if (other && (!time || *other < *time)) time = other;
}

/// One round of poll(2): add the awaited events, then wait. An earlier handler of the same round
/// may have closed a later handler's object, so each handler must check that its object still
/// exists. Not thread-safe.
class Poller {
 public:
  using Handler = std::function<void(short revents)>;

  void add(int fd, short events, Handler handler) {
    polls_.push_back({fd, events, 0});
    handlers_.push_back(std::move(handler));
  }
  /// Waits for the first event, at most `timeout_ms` (negative: forever), and runs the handlers of
  /// all events that have occurred.
  void wait(int timeout_ms) {
    // On EINTR and other errors revents stay 0, and the caller's next round tries again.
    if (::poll(polls_.data(), polls_.size(), timeout_ms) <= 0) return;
    for (std::size_t i = 0; i < polls_.size(); ++i) {
      if (polls_[i].revents != 0) handlers_[i](polls_[i].revents);
    }
  }
  /// Like wait(), until the deadline; without one, forever.
  void wait_until(const std::optional<Deadline>& deadline) {
    if (!deadline) return wait(-1);
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(*deadline - std::chrono::steady_clock::now());
    wait(static_cast<int>(std::clamp<long long>(left.count(), 0, INT_MAX)));
  }

 private:
  std::vector<pollfd> polls_;
  std::vector<Handler> handlers_;
};

}  // namespace hvd::launcher
