#pragma once

#include <hvd/hvd.h>
#include <sys/resource.h>

#include <csignal>

namespace hvd::testing {

/// While an object exists, the last rank cannot write files of more than 100 bytes, as if its disk
/// were full.
class LimitOnLastRank {
 public:
  LimitOnLastRank() : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = 100;
    if (rank() == size() - 1) ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  LimitOnLastRank(const LimitOnLastRank&) = delete;
  LimitOnLastRank& operator=(const LimitOnLastRank&) = delete;
  ~LimitOnLastRank() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

}  // namespace hvd::testing
