#pragma once

namespace hvd::libtorch {

/// While one lives, SIGTERM does not end the process but is remembered; a handler that the program
/// has installed before is called too. When the last one goes, what was there before is back.
/// Thread-safe but for the construction of the first and the destruction of the last one.
class TerminationNotice {
 public:
  TerminationNotice();
  TerminationNotice(const TerminationNotice&) = delete;
  TerminationNotice& operator=(const TerminationNotice&) = delete;
  ~TerminationNotice();

  /// Whether SIGTERM has come since the first of those that live was made.
  static bool given() noexcept;
};

}  // namespace hvd::libtorch
