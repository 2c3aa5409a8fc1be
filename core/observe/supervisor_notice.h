#pragma once

#include <string_view>

namespace hvd::observe {

/// A notice of a process under hvdrun to its supervisor, sent at most once per kind and life of the
/// runtime. hvdrun uses the notices to find the rank that failed first, because the ranks that end
/// because of a loss often end before the rank that caused it.
enum class NoticeKind {
  kInitialised,  ///< it has joined a job; code 1: the program had started MPI itself before
  kThrow,        ///< an uncaught exception ends it
  kExit,         ///< it ends without shutdown(), with this exit code
  kLoss,         ///< another rank is lost (the code is the status): a later end of this rank is a
                 ///< consequence
  kLeft,         ///< it has called shutdown(), perhaps while other ranks still need its operations
  kOver,         ///< the process has left the job, in order or in reconfigure()
};

/// Sends a notice. No effect without a supervisor. Waits for at most 0.1 s. Thread-safe.
/// @param about the rank that is lost or has left; -1: unknown, or no other rank is concerned
void notify_supervisor(NoticeKind, int code, std::string_view text, int about = -1) noexcept;

/// Whether ranks have the numbers that the supervisor gave them, as they have at first. Otherwise
/// notices name no rank. Thread-safe.
void set_ranks_of_supervisor(bool) noexcept;

/// The text of an exception without the backtrace that LibTorch appends, cut to the size of a
/// notice.
std::string_view without_backtrace(std::string_view what);

}  // namespace hvd::observe
