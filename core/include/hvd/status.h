#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace hvd {

/// @addtogroup adapters
/// @{

/// How an operation ended. The numbers travel on the wire: append only.
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kUsage = 1,
  kMismatch = 2,
  kStalled = 3,
  kPeerLost = 4,
  kShutdown = 5,
  kInternal = 6,
};
/// The number of codes.
inline constexpr int kStatusCodeCount = 7;

/// The result of an operation: a code and, unless it is kOk, a text for the user.
struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message = {};
  int rank = -1;  ///< the lost rank (kPeerLost) or the missing one (kStalled); -1: unknown

  bool ok() const noexcept { return code == StatusCode::kOk; }
  /// Throws the error class that belongs to the code, unless ok().
  void raise_if_error() const;
};

/// A point in a device's stream. Backends that complete on the host use a null EventPtr.
/// Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  /// Whether the device has reached it. Does not wait.
  virtual bool query() const = 0;
  /// The native handle (CUDA: a cudaEvent_t), for a stream to wait for. Events passed to hvd as
  /// `input_ready` of a GPU tensor must have one.
  virtual void* native() const noexcept { return nullptr; }
};
using EventPtr = std::shared_ptr<Event>;

/// @}

}  // namespace hvd
