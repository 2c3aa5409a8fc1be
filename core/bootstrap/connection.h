#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// The addresses of a host, or the reason why its name does not resolve.
struct Resolved {
  std::vector<sockaddr_storage> addresses = {};  ///< IPv4 or IPv6
  std::string problem = {};
};
/// Resolves a name in a detached thread, because a look-up may take longer than any deadline and
/// cannot be cancelled. "localhost" is 127.0.0.1 and ::1 without a look-up.
std::future<Resolved> resolve(const std::string& host, std::uint16_t port);

/// A connected stream socket whose calls wait at most until a deadline. Closed on exec. Not
/// thread-safe.
///
/// Uses system calls instead of Asio. A child made by fork() would share Asio's epoll descriptor,
/// and would end the notifications of its parent when it closed its copies of the sockets.
class Connection {
 public:
  /// The reason why a call has failed, such as "Connection refused". Not an hvd::Error.
  struct Failure {
    std::string reason = {};
    bool unresolved = false;  ///< the host name does not resolve
  };

  Connection() = default;
  explicit Connection(int descriptor) : descriptor_(descriptor) {}
  Connection(Connection&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Connection& operator=(Connection&& other) noexcept;
  ~Connection() { close(); }

  /// Connects to a socket in the abstract namespace. The result is not open if the queue of the
  /// socket was full until the deadline. @throws Failure
  static Connection to_abstract_socket(const std::string& name, Deadline);
  /// Resolves a host name, and tries its addresses side by side, each a quarter of a second after
  /// the one before (RFC 8305).
  /// @param host without brackets
  /// @throws Failure
  static Connection to_host(const std::string& host, std::uint16_t port, Deadline);

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }
  void close() noexcept;
  /// Ends the connection for all processes that hold it.
  void shut_down() noexcept;

  /// Sends a frame: the length of the body in four bytes, and the body. @throws Failure
  void send(std::span<const std::byte> body, Deadline) const;
  /// Receives the body of a frame. @throws Failure, also for a body above the limit
  Bytes receive(std::uint32_t limit, Deadline) const;

 private:
  void wait_for(short event, Deadline) const;
  void send_all(std::span<const std::byte>, Deadline) const;
  void receive_all(std::span<std::byte>, Deadline) const;

  int descriptor_ = -1;
};

}  // namespace hvd::rendezvous
