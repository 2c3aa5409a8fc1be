#pragma once

#include <asio/io_context.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "system/event_loop.h"

namespace hvd::launcher {

enum class Stream { kStdout = 0, kStderr = 1 };

/// hvdrun's stdout and stderr, fed by many writers line by line. Queues output for a slow reader,
/// so that signals and reports are still handled while a user pages through the output. After an
/// error output is dropped, and failure() returns the error. When both streams go to the same file
/// or terminal, they share one queue and keep their order. Not thread-safe.
class Console {
 public:
  static constexpr int kNoOwner = -1;

  Console(asio::io_context& io, int stdout_fd, int stderr_fd);

  bool is_terminal(Stream stream) const;
  /// Writes a piece of a line. Ends an unfinished line of another owner first.
  void write(Stream stream, int owner, std::string_view text);
  /// Whether the stream's last output is an unfinished line of this owner, which write() would
  /// continue. Output that ends in '\r' counts as finished.
  bool continues(Stream stream, int owner) const;
  /// Ends an unfinished line of any owner.
  void finish_lines();

  std::size_t pending() const noexcept {
    return targets_[0].queue.size() + targets_[1].queue.size();
  }
  /// The errno of the write that failed; nullopt if no write has failed.
  std::optional<int> failure(Stream stream) const;
  bool shares(Stream a, Stream b) const { return &target(a) == &target(b); }
  /// Bytes written so far, which grows while a reader reads.
  std::size_t progress() const noexcept { return progress_; }
  /// Drops the queue and returns the number of its bytes.
  std::size_t drop(Stream stream);
  bool is_stuck(Stream stream) const { return !target(stream).queue.empty(); }

 private:
  struct Target {
    int fd = -1;
    std::unique_ptr<SharedDescriptor> ready;
    bool terminal = false, waiting = false;
    std::string queue;
    std::size_t written = 0;
    int owner = kNoOwner;
    char last = '\n';
    int error = 0;
  };
  Target& target(Stream stream) { return targets_[shared_ ? 0 : static_cast<int>(stream)]; }
  const Target& target(Stream stream) const {
    return targets_[shared_ ? 0 : static_cast<int>(stream)];
  }
  void wait(Target& target);
  void write_some(Target& target);

  bool shared_ = false;
  std::size_t progress_ = 0;
  Target targets_[2];
};

}  // namespace hvd::launcher
