#pragma once

#include <stdexcept>
#include <string>

namespace hvd {

/// @addtogroup errors
/// @{

/// The base class of all exceptions of this library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The call itself was wrong. It sent no message and had no effect.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A function that needs `init()` was called before it, or after `shutdown()`.
class NotInitializedError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Ranks disagree about one operation (shape, dtype, op, root, ...). Raised on every rank of the
/// process set once the last one has submitted; the runtime continues.
class MismatchError : public Error {
 public:
  using Error::Error;
};

/// Some ranks did not submit an operation within `Options::stall_shutdown`. Raised on the ranks
/// that wait, and on each missing rank at its next submission of that name; the runtime continues.
class StalledError : public Error {
 public:
  explicit StalledError(const std::string& message, int rank = -1) : Error(message), rank_(rank) {}
  /// The rank that did not submit it, or -1 if it is more than one.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// A peer died, stopped or left. The runtime has failed: every outstanding and later operation
/// raises the same error until `shutdown()`.
class PeerLostError : public Error {
 public:
  PeerLostError(const std::string& message, int rank) : Error(message), rank_(rank) {}
  /// The lost rank, or -1 if it is not known which rank was lost.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// The operation was cut off by a shutdown; the message carries the root cause when there is one.
class ShutdownError : public Error {
 public:
  using Error::Error;
};

/// @}

}  // namespace hvd
