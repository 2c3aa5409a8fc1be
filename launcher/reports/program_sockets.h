#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reports/report.h"
#include "system/poller.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Receives the notices of a supervisor's program through a datagram socket in the abstract
/// namespace, which needs no file and ends with the supervisor. Notices of other users' processes
/// are ignored. Not thread-safe.
class NoticeSocket {
 public:
  /// If the socket cannot be made, `fd()` is -1 and hvdrun receives no notices.
  NoticeSocket();
  int fd() const noexcept { return fd_.get(); }
  const std::string& name() const noexcept { return name_; }
  /// The next notice that has arrived. Does not wait.
  std::optional<Notice> next();

 private:
  UniqueFd fd_;
  std::string name_;
};

/// Parses "KIND TIME_NS CODE ABOUT", a newline, and the text. Empty if the message is malformed.
std::optional<Notice> parse_notice(std::string_view datagram);

/// A stream socket in the abstract namespace, through which the processes of a rank exchange
/// rendezvous frames with hvdrun. The supervisor passes the bytes on in both directions without
/// reading them. Not thread-safe.
///
/// Every process on the host may connect. hvdrun receives the bytes of a process and identifies the
/// process by them. Only a few connections of other users may exist at a time.
class RendezvousSocket {
 public:
  /// Bytes from a process of the rank. `last`: the process has ended, or closed its connection.
  struct Received {
    std::uint32_t session = 0;
    std::string bytes = {};
    bool last = false;
  };

  /// @throws LaunchError (kInternal) when the socket cannot be made
  RendezvousSocket();
  const std::string& name() const noexcept { return name_; }
  void add_to(Poller& poller);
  /// Reads the bytes that have arrived on all connections. Does not wait.
  void read_all();
  /// The bytes that were read since the last call, in the order of their arrival.
  std::vector<Received> pop_received();
  /// Sends bytes to a process; ignored if its connection has ended.
  void reply(const RendezvousBytes& reply);
  void close_all() { clients_.clear(); }

 private:
  struct Client {
    UniqueFd fd;
    UniqueFd process;  ///< a pidfd, because a child that inherits the connection keeps it open
    pid_t pid = 0;
    bool other_user = false;
    std::string outgoing = {};
    bool closing = false;  ///< to be closed when `outgoing` has been sent
  };

  void accept_all();
  void read(std::uint32_t id);
  void flush(std::uint32_t id);
  void end(std::uint32_t id);

  UniqueFd listener_;
  std::string name_;
  std::uint32_t next_id_ = 0;
  std::map<std::uint32_t, Client> clients_;  ///< by session number
  std::vector<Received> received_;
};

}  // namespace hvd::launcher
