#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "system/poller.h"

namespace hvd::launcher {

enum class Stream { kStdout = 0, kStderr = 1 };

/// hvdrun's stdout and stderr, fed by many writers line by line. Queues what the reader is too slow
/// for, so that signals and reports are still handled while somebody pages through the output. What
/// cannot be written is dropped, and failure() says so. When both streams go to the same file or
/// terminal, they share one queue and keep their order. Not thread-safe.
class Console {
 public:
  static constexpr int kNobody = -1;

  Console(int stdout_fd, int stderr_fd);

  bool is_terminal(Stream stream) const;
  /// Writes a piece of a line. When somebody else's line is unfinished there, it is ended first.
  void write(Stream stream, int owner, std::string_view text);
  /// The last thing written there is an unfinished line of this owner, which `write` would
  /// continue; one that ended in '\r' starts anew.
  bool continues(Stream stream, int owner) const;
  /// Ends an unfinished line, whosever it is.
  void finish_lines();

  std::size_t pending() const noexcept {
    return devices_[0].queue.size() + devices_[1].queue.size();
  }
  void add_to(Poller& poller);
  /// errno of the first write that failed.
  std::optional<int> failure(Stream stream) const;
  bool shares(Stream a, Stream b) const { return &device(a) == &device(b); }
  /// Bytes written so far: whether somebody reads.
  std::size_t progress() const noexcept { return progress_; }
  /// Drops what is queued; how much that was.
  std::size_t drop(Stream stream);
  bool is_stuck(Stream stream) const { return !device(stream).queue.empty(); }
  /// Writes what is queued, for as long as it takes, unless the reader has gone.
  void flush();

 private:
  struct Device {
    int fd = -1;
    bool terminal = false;
    std::string queue;
    std::size_t written = 0;
    int owner = kNobody;
    char last = '\n';
    int error = 0;
  };
  Device& device(Stream stream) { return devices_[shared_ ? 0 : static_cast<int>(stream)]; }
  const Device& device(Stream stream) const {
    return devices_[shared_ ? 0 : static_cast<int>(stream)];
  }
  void write_some(Device& device);

  bool shared_ = false;
  std::size_t progress_ = 0;
  Device devices_[2];
};

}  // namespace hvd::launcher
