#include "system/poller.h"

#include <utility>

namespace hvd::launcher {

void Poller::add(int fd, short events, Handler handler) {
  polls_.push_back({fd, events, 0});
  handlers_.push_back(std::move(handler));
}

void Poller::wait(int timeout_ms) {
  // On EINTR and other errors revents stay 0 and the caller's next round tries again.
  if (::poll(polls_.data(), polls_.size(), timeout_ms) <= 0) return;
  for (std::size_t i = 0; i < polls_.size(); ++i) {
    if (polls_[i].revents != 0) handlers_[i](polls_[i].revents);
  }
}

}  // namespace hvd::launcher
