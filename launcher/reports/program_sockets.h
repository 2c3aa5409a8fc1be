#pragma once

#include <sys/types.h>

#include <asio/io_context.hpp>
#include <asio/local/stream_protocol.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "reports/report.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Receives the notices of a rank's program through a datagram socket in the abstract namespace,
/// which needs no file and ends with the agent. Notices of other users' processes are ignored. Not
/// thread-safe.
class NoticeSocket {
 public:
  /// If the socket cannot be made, `name()` is empty and hvdrun receives no notices.
  /// @param on_notices is called from the loop when next() has notices
  NoticeSocket(asio::io_context& io, std::function<void()> on_notices);
  const std::string& name() const noexcept { return name_; }
  /// The next notice that has arrived. Does not wait.
  std::optional<Notice> next();

 private:
  void wait();

  asio::posix::stream_descriptor socket_;
  std::string name_;
  std::function<void()> on_notices_;
};

/// Parses "KIND TIME_NS CODE ABOUT", a newline, and the text. Empty if the message is malformed.
std::optional<Notice> parse_notice(std::string_view datagram);

/// A stream socket in the abstract namespace, through which the processes of a rank exchange
/// rendezvous frames with hvdrun. The agent passes the bytes on in both directions without reading
/// them. Not thread-safe.
///
/// Every process on the host may connect. hvdrun receives the bytes of a process and identifies the
/// process by them. Only a few connections of other users may exist at a time.
class RendezvousSocket {
 public:
  /// Receives bytes from a process of the rank. `last` is passed once for each session: the process
  /// has ended or closed its connection, or all bytes of the last reply have been sent.
  using Receive = std::function<void(const RendezvousBytes&)>;
  /// Whether bytes can be received now.
  using MayRead = std::function<bool()>;

  /// @throws LaunchError (kInternal) when the socket cannot be made
  RendezvousSocket(asio::io_context& io, Receive receive, MayRead may_read);
  const std::string& name() const noexcept { return name_; }
  /// Reads the bytes that have arrived on all connections. Does not wait.
  void read_all();
  /// Continues to read, after `may_read` has returned false.
  void resume();
  /// Sends bytes to a process; ignored if its connection has ended.
  void reply(const RendezvousBytes& reply);
  /// Ends all connections without a report, and accepts no more.
  void close();

 private:
  using Socket = asio::local::stream_protocol::socket;
  struct Client {
    Client(Socket connected, UniqueFd process);
    void close();
    Socket socket;
    /// Identifies the process. The connection may outlive the process, because a child that has
    /// inherited it keeps it open.
    asio::posix::stream_descriptor pidfd;
    pid_t pid = 0;
    bool other_user = false;
    std::string outgoing = {}, writing = {};
    bool closing = false;  ///< to be closed when `outgoing` has been sent
    bool parked = false;   ///< waits for resume()
  };

  void accept();
  void add(Socket socket);
  void wait(std::uint32_t id);
  void wait_for_end_of_process(std::uint32_t id, const std::shared_ptr<Client>&);
  void read(std::uint32_t id);
  void flush(std::uint32_t id);
  void end(std::uint32_t id);

  asio::local::stream_protocol::acceptor listener_;
  asio::steady_timer accept_again_;
  std::string name_;
  Receive receive_;
  MayRead may_read_;
  std::uint32_t next_id_ = 0;
  std::map<std::uint32_t, std::shared_ptr<Client>> clients_;  ///< by session number
};

}  // namespace hvd::launcher
