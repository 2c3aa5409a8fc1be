#pragma once

namespace hvd::libtorch {

/// While an object exists, SIGTERM does not end the process but is recorded. A handler that the
/// program has installed before is called too. The destructor of the last object restores the
/// former action. Thread-safe, except for the construction of the first object and the destruction
/// of the last.
class TerminationNotice {
 public:
  TerminationNotice();
  TerminationNotice(const TerminationNotice&) = delete;
  TerminationNotice& operator=(const TerminationNotice&) = delete;
  ~TerminationNotice();

  /// Returns whether the process has received SIGTERM since the first of the present objects was
  /// made.
  static bool given() noexcept;
};

}  // namespace hvd::libtorch
