#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "bootstrap/store_server.h"

namespace hvd::rendezvous {

/// The time for which rank 0 waits for a port in use, and for which the other ranks wait for the
/// end of another job's server at the port. That server may belong to an earlier run that ends
/// soon.
inline constexpr auto kTimeToBeFree = std::chrono::seconds(3);

/// Serves a StoreServer at a TCP port of all addresses of this host, in its own thread. Any thread
/// may call it. In a child made by fork(), only the destructor may be called.
///
/// Connections that are not admitted are limited in number and time. If no descriptor is left for a
/// connection, the server logs it once, ends the oldest connection that is not admitted, and pauses
/// before it accepts the next one.
class SocketServer {
 public:
  /// Waits for a port that is in use: kTimeToBeFree.
  /// @param port 0: any free port
  /// @throws UsageError when it cannot listen on the port
  SocketServer(std::uint16_t port, StoreServer::Options, Deadline);
  SocketServer(const SocketServer&) = delete;
  SocketServer& operator=(const SocketServer&) = delete;
  /// Ends all waits with PeerLostError(0), and sends pending replies for at most a second.
  ~SocketServer();

  std::uint16_t port() const noexcept;
  /// See StoreServer::fail().
  void fail(const Refusal&);
  /// See StoreServer::remarks().
  std::string remarks(std::span<const int> ranks) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hvd::rendezvous
