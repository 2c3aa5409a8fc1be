#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/tag.h"

/// UCX as hvd uses it. No header of UCX is needed here, so that a test can take its place.
namespace hvd::ucx {

/// UCX's codes (ucs_status_t): below zero is an error, which Worker::describe() puts into words.
using Status = int;
inline constexpr Status kOk = 0;
inline constexpr Status kInProgress = 1;
inline constexpr Status kTruncated = -9;   ///< a message was longer than its receiver's room
inline constexpr Status kCancelled = -16;  ///< by this rank

struct Endpoint {
  void* handle = nullptr;
};

/// A call that has begun something.
struct Started {
  /// To be asked for, and to be freed. Null: `status` is all there is to know.
  void* request = nullptr;
  Status status = kOk;
};

/// A whole message that has been taken from the queue and not been received.
struct Matched {
  void* message = nullptr;
  message::Tag tag = 0;
  std::size_t bytes = 0;
};

enum class CloseMode : std::uint8_t {
  kFlush,  ///< what was sent leaves first
  kForce   ///< what is under way ends with an error
};

/// A communication worker of UCX and the context that it belongs to: tagged messages to endpoints,
/// from anybody. Nothing waits.
///
/// Not thread-safe, but different threads may use it one after the other. Memory is touched inside
/// its functions only, but for what hardware does on endpoints that are not closed. Requests and
/// endpoints end with it.
class Worker {
 public:
  virtual ~Worker() = default;

  /// What a peer needs for connect(): some hundred bytes. @throws hvd::Error
  virtual std::vector<std::byte> address() = 0;
  /// @param failure becomes the error when the connection breaks; has to live as long as the
  /// worker
  /// @param made the endpoint, if the answer is kOk
  virtual Status connect(std::span<const std::byte> address, Status* failure, Endpoint& made) = 0;
  /// The endpoint is void at once; whether all has ended, the request says.
  virtual Started close(Endpoint, CloseMode) = 0;

  virtual Started send(Endpoint, std::span<const std::byte>, message::Tag) = 0;
  /// From anybody who sends with this very tag.
  virtual Started receive(std::span<std::byte>, message::Tag) = 0;
  /// @param message of probe(), which is void then
  virtual Started receive(std::span<std::byte>, void* message) = 0;
  /// The next message whose tag agrees with `tag` where `mask` has ones.
  virtual std::optional<Matched> probe(message::Tag tag, message::Tag mask) = 0;

  virtual Status status_of_send(void* request) = 0;
  /// @param bytes how many the message had, once the answer is kOk
  virtual Status status_of_receive(void* request, std::size_t& bytes) = 0;
  /// Asks for the end of a receive. Its status says when, and whether, it has come; one that has
  /// been matched goes on.
  virtual void cancel_receive(void* request) noexcept = 0;
  /// Of one that is still under way: UCX frees it when it ends.
  virtual void free(void* request) noexcept = 0;

  /// Lets UCX work. False: there was nothing to do.
  virtual bool progress() = 0;
  virtual std::string describe(Status) const = 0;
};

}  // namespace hvd::ucx
