#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// Cuts a byte stream into segments that end in "\n", "\r\n" or "\r" (a progress bar redrawing its
/// line). Keeps the terminators, so that the segments put together are the stream. Pure. Not
/// thread-safe.
class LineSplitter {
 public:
  /// An unfinished line longer than `max_segment` bytes is returned in parts of whole characters.
  explicit LineSplitter(std::size_t max_segment = 64 * 1024) : max_segment_(max_segment) {}

  std::vector<std::string> feed(std::string_view bytes);
  /// The unfinished line without an incomplete UTF-8 character at its end.
  std::string take_partial();
  /// The unfinished line as a whole, at the end of the stream.
  std::string take_rest();
  bool has_partial() const noexcept { return !partial_.empty(); }

 private:
  std::size_t max_segment_;
  std::string partial_;
};

/// The number of bytes of an incomplete UTF-8 character at the end of `text`.
std::size_t unfinished_character(std::string_view text);

/// The last lines of a stream, as a person would see them on a terminal: "\r" overwrites its line.
/// Backtraces, which would push everything else out, are left out. Not thread-safe.
class TailBuffer {
 public:
  static constexpr std::size_t kMaxLine = 2000;

  explicit TailBuffer(std::size_t lines) : limit_(lines) {}
  void feed(std::string_view bytes);
  /// Oldest first; an unfinished last line counts.
  std::vector<std::string> lines() const;

 private:
  void push(std::string line);

  const std::size_t limit_;
  std::vector<std::string> lines_;
  std::string current_;
  bool restart_ = false;
};

}  // namespace hvd::launcher
