#pragma once

#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "system/unique_fd.h"

namespace hvd::launcher {

/// The agent's end of the stream between a worker of an elastic job and hvdrun. The agent passes
/// the bytes on in both directions without reading them. Hold it by a shared_ptr: pending
/// operations do so too. Not thread-safe.
class MemberSocket : public std::enable_shared_from_this<MemberSocket> {
 public:
  using Receive = std::function<void(std::string_view)>;
  /// Whether bytes can be received now.
  using MayRead = std::function<bool()>;

  /// Makes a socket pair. @param worker_end set to the other end
  /// @throws LaunchError (kInternal) when no descriptor is left.
  static std::shared_ptr<MemberSocket> make(asio::io_context& io, Receive receive, MayRead may_read,
                                            UniqueFd& worker_end);

  /// Sends bytes to the worker, and queues those that it has not read.
  void send(std::string_view bytes);
  /// Reads the bytes that have arrived. Does not wait.
  void read_all();
  /// Continues to read, after `may_read` has returned false.
  void resume();
  void close();

 private:
  MemberSocket(asio::io_context& io, UniqueFd end, Receive receive, MayRead may_read);
  void wait_to_read();
  void wait_to_write();
  void write();

  asio::posix::stream_descriptor socket_;
  const Receive receive_;
  const MayRead may_read_;
  std::string outgoing_;
  bool writing_ = false, parked_ = false, ended_ = false;
};

}  // namespace hvd::launcher
