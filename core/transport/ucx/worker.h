#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/carrier.h"

/// The interface between hvd and UCX. It needs no header of UCX, so that tests can simulate it.
namespace hvd::ucx {

/// UCX's codes (ucs_status_t). Negative values are errors; Worker::describe() has their texts.
using Status = int;
inline constexpr Status kOk = 0;
inline constexpr Status kInProgress = 1;
inline constexpr Status kTruncated = -9;   ///< the message was longer than the receiver's buffer
inline constexpr Status kCancelled = -16;  ///< by this rank
inline constexpr Status kUnsupported = -22;

struct Endpoint {
  void* handle = nullptr;
};

/// The result of a call that starts an operation.
struct StartResult {
  /// The caller polls its status and frees it. Null: the operation is over, with `status`.
  void* request = nullptr;
  Status status = kOk;
};

/// A message that is received into a reader.
struct Parts {
  message::PartReader* reader = nullptr;
  std::size_t bytes = 0;    ///< of the whole message
  std::size_t arrived = 0;  ///< that the reader has taken
};

/// A whole message that has been matched but not received yet.
struct Matched {
  void* message = nullptr;
  message::Tag tag = 0;
  std::size_t bytes = 0;
};

enum class CloseMode : std::uint8_t {
  kFlush,  ///< sends complete first
  kForce   ///< messages under way end with an error
};

/// A communication worker of UCX and its context. It sends tagged messages to endpoints, and
/// receives them from any source. No call blocks.
///
/// Not thread-safe, but different threads may use it one after the other. The memory of messages is
/// accessed inside its functions only, except by hardware on open endpoints. Requests and endpoints
/// end with it.
class Worker {
 public:
  virtual ~Worker() = default;

  /// The address that a peer passes to connect(): a few hundred bytes. @throws hvd::Error
  virtual std::vector<std::byte> address() = 0;
  /// @param failure set to the error when the connection breaks; must live as long as the worker
  /// @param made set to the endpoint if the result is kOk
  virtual Status connect(std::span<const std::byte> address, Status* failure, Endpoint& made) = 0;
  /// The endpoint is invalid at once. The request completes when the connection is closed.
  virtual StartResult close(Endpoint, CloseMode) = 0;

  virtual StartResult send(Endpoint, std::span<const std::byte>, message::Tag) = 0;
  /// Receives from any source. The tag must match exactly.
  virtual StartResult receive(std::span<std::byte>, message::Tag) = 0;
  /// Receives into a reader, which progress() and this call may call. Fails with kUnsupported if
  /// the worker cannot. @param parts stays in place until the request is freed, or until the worker
  /// makes no more progress
  virtual StartResult receive(Parts& /*parts*/, message::Tag) { return {nullptr, kUnsupported}; }
  /// @param message from probe(); usable once
  virtual StartResult receive(std::span<std::byte>, void* message) = 0;
  /// Matches the next message whose tag equals `tag` in the bits of `mask`.
  virtual std::optional<Matched> probe(message::Tag tag, message::Tag mask) = 0;

  virtual Status status_of_send(void* request) = 0;
  /// @param bytes set to the length of the message if the result is kOk
  virtual Status status_of_receive(void* request, std::size_t& bytes) = 0;
  /// Requests the cancellation of a receive and returns at once; poll the request's status. A
  /// receive that has been matched continues.
  virtual void cancel_receive(void* request) noexcept = 0;
  /// Frees the request. If its operation is under way, UCX frees it when the operation ends.
  virtual void free(void* request) noexcept = 0;

  /// Lets UCX make progress. Returns false if there was no work to do.
  virtual bool progress() = 0;
  virtual std::string describe(Status) const = 0;

  /// Text for users if UCX has run out of a resource of this process, for example file descriptors,
  /// since the last call that returned a text. The shortage, not a peer, is then the cause of
  /// errors. Empty without a shortage.
  /// @param error of the call that has failed; kOk: report only shortages of UCX's background work,
  /// where no call returns an error
  virtual std::string take_resource_exhaustion(Status /*error*/) { return {}; }
};

/// Identifies one of a rank's workers: one for each plane and direction. See Note [Connections go
/// one way].
enum class Side : std::uint8_t { kControlIn, kControlOut, kDataIn, kDataOut };
inline constexpr std::size_t kSides = 4;

/// The workers of a rank.
struct Workers {
  std::unique_ptr<Worker> of[kSides] = {};  ///< by Side
  /// Whether only the workers' functions access the memory of messages, and no peer or hardware.
  bool only_workers_touch_memory = false;
  std::string interface = {};  ///< the only one in use, for error texts; empty: UCX chooses

  /// The addresses of all workers, for the other ranks: a few hundred bytes. @throws hvd::Error
  std::vector<std::byte> address() const;
};

/// The part of a Workers::address() that belongs to one worker.
/// @throws hvd::Error when `whole` is not such an address
std::span<const std::byte> part_of(std::span<const std::byte> whole, Side);

inline constexpr const char* kSystemLibrary = "libucp.so.0";

/// Makes a rank's workers. Loads UCX at the first call, and never unloads it. Thread-safe.
///
/// hvd changes settings of UCX that the user's environment does not contain: Note [UCX's settings]
/// in ucx_settings.cpp. UCX's log messages go into hvd's log.
/// @param interface the network interface to use and to listen on, such as "eth0", if TCP is the
/// only transport and the user has not set UCX_NET_DEVICES. Empty: UCX chooses
/// @throws hvd::Error when UCX is missing or too old; the text names the library to install
Workers open_workers(const std::string& interface = {},
                     const std::string& library = kSystemLibrary);
/// Makes workers like those of the last call of open_workers(). The next call returns them if it
/// has the same arguments. No effect without an earlier call, or if such workers exist already.
/// Thread-safe, also while other workers are in use.
/// @throws hvd::Error when UCX cannot make them
void prepare_workers();

/// Text for users: "1.13.1 (libucp.so.0)", or why UCX cannot be used. Loads UCX.
std::string describe_library(const std::string& library = kSystemLibrary);

}  // namespace hvd::ucx
