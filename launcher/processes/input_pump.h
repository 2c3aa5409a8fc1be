#pragma once

#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <memory>
#include <string>

#include "system/event_loop.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Copies from one descriptor to another, as fast as the target accepts the data. Not thread-safe.
///
/// A terminal is read only while this process is in its foreground, because the kernel would stop a
/// background process that reads.
class InputPump {
 public:
  /// @param source stays open; negative: only `head` is written
  /// @param head is written first
  InputPump(asio::io_context& io, int source, UniqueFd target, std::string head = {});

  /// Whether the target has been closed, at the source's end or because its reader has closed it.
  bool done() const { return !target_.is_open(); }

 private:
  void watch_reader();
  void write();
  void wait();
  void read();
  void end();

  const int source_;
  std::unique_ptr<SharedDescriptor> readable_;  ///< null without a source, and after its end
  asio::posix::stream_descriptor target_;
  asio::steady_timer background_;
  std::string pending_;
};

}  // namespace hvd::launcher
