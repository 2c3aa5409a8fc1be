#pragma once

#include <poll.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace hvd::launcher {

/// One round of poll(2): add the awaited events, then wait. An earlier handler of the same round
/// may have closed a later handler's object, so each handler looks its object up. Not thread-safe.
class Poller {
 public:
  using Handler = std::function<void(short revents)>;

  void add(int fd, short events, Handler handler) {
    polls_.push_back({fd, events, 0});
    handlers_.push_back(std::move(handler));
  }
  /// Waits for the first event, at most `timeout_ms` (negative: forever), and runs the handlers of
  /// all that are ready.
  void wait(int timeout_ms) {
    // On EINTR and other errors revents stay 0, and the caller's next round tries again.
    if (::poll(polls_.data(), polls_.size(), timeout_ms) <= 0) return;
    for (std::size_t i = 0; i < polls_.size(); ++i) {
      if (polls_[i].revents != 0) handlers_[i](polls_[i].revents);
    }
  }

 private:
  std::vector<pollfd> polls_;
  std::vector<Handler> handlers_;
};

}  // namespace hvd::launcher
