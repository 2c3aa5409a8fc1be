#pragma once

#include <string_view>

namespace hvd::observe {

/// What a process under hvdrun tells its supervisor about itself, at most once each per life of the
/// runtime. hvdrun names the rank that failed first by it: when an end is noticed from outside, the
/// ranks that died of the loss are often gone before the one that caused it.
enum class NoticeKind {
  kInitialised,  ///< it has joined a job; code 1: the program had started MPI itself before
  kThrow,        ///< an exception that nobody catches ends it
  kExit,         ///< it ends without shutdown(), with this exit code
  kLoss,  ///< it has been told that another rank is lost (the code is the status): what ends it
          ///< from here on is a consequence
  kLeft,  ///< it called shutdown() while others still had work for it
  kOver,  ///< shutdown() has ended in order: the process is in no job any more
};

/// Does nothing where no supervisor listens. Never waits for long, and never fails. Thread-safe.
/// @param about the rank that is lost or has left; -1: unknown, or no other rank is concerned
void notify_supervisor(NoticeKind, int code, std::string_view text, int about = -1) noexcept;

/// What an exception says, without the backtrace that LibTorch appends to it, and short enough to
/// travel.
std::string_view without_backtrace(std::string_view what);

}  // namespace hvd::observe
