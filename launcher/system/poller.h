#pragma once

#include <poll.h>

#include <functional>
#include <vector>

namespace hvd::launcher {

/// One round of poll(2): add what is awaited, then wait. A handler may run after an earlier handler
/// of the same round closed what it is about, so it looks its object up. Not thread-safe.
class Poller {
 public:
  using Handler = std::function<void(short revents)>;

  void add(int fd, short events, Handler handler);
  /// Waits for the first event, at most `timeout_ms` (negative: forever), and runs the handlers of
  /// all that are ready.
  void wait(int timeout_ms);

 private:
  std::vector<pollfd> polls_;
  std::vector<Handler> handlers_;
};

}  // namespace hvd::launcher
