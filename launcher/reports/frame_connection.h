#pragma once

#include <asio/buffer.hpp>
#include <asio/ip/tcp.hpp>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// A TCP connection that carries frames in both directions. Queues frames that the peer has not
/// read. Hold it by a shared_ptr: pending operations do so too. Not thread-safe.
class FrameConnection : public std::enable_shared_from_this<FrameConnection> {
 public:
  using Shared = std::shared_ptr<const std::vector<std::byte>>;
  /// Returns false if the peer has violated the protocol, which ends the connection.
  using OnFrame = std::function<bool(const Frame&)>;
  using OnEnd = std::function<void()>;

  explicit FrameConnection(asio::ip::tcp::socket socket) : socket_(std::move(socket)) {}

  /// Begins to read.
  /// @param on_frame may throw ProtocolError, and may close the connection
  /// @param on_end the peer has closed the connection, it broke, or the protocol was violated; not
  /// called after close()
  void start(OnFrame on_frame, OnEnd on_end);
  void send(FrameType type, int rank, std::string_view payload);
  /// Sends bytes of the rendezvous without a copy, in as many frames as they need.
  void send(FrameType type, int rank, std::uint32_t session, bool last, const Shared& bytes);
  /// Whether all bytes have been given to the kernel.
  bool sent_all() const noexcept { return unsent_ == 0; }
  std::size_t unsent() const noexcept { return unsent_; }
  /// Closes the connection; neither handler is called from then on.
  void close();
  /// Likewise, but first sends the queued frames, and waits until the peer has closed the
  /// connection. Call it in a loop that still runs.
  void close_when_sent();
  bool closed() const noexcept { return closed_; }
  const asio::ip::tcp::socket& socket() const noexcept { return socket_; }

 private:
  struct Part {
    std::shared_ptr<const void> owner;
    asio::const_buffer bytes;
  };

  void read();
  bool read_frames();
  void end();
  void end_sending();
  void add(std::string bytes);
  void write();

  asio::ip::tcp::socket socket_;
  FrameDecoder decoder_;
  std::deque<Part> parts_;
  std::size_t unsent_ = 0;
  bool writing_ = false, closed_ = false, closing_ = false;
  OnFrame on_frame_;
  OnEnd on_end_;
};

}  // namespace hvd::launcher
