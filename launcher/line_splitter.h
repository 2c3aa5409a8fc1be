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
  /// Above this a line without an end is handed out in parts.
  static constexpr std::size_t kMaxSegment = 64 * 1024;

  std::vector<std::string> feed(std::string_view bytes);
  /// What has no end yet.
  std::string take_partial();
  bool has_partial() const noexcept { return !partial_.empty(); }

 private:
  std::string partial_;
};

/// The last lines of a stream, as a person would see them on a terminal: "\r" starts its line
/// again. Backtraces, which would push everything else out, are left out. Not thread-safe.
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
