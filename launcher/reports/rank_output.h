#pragma once

#include <array>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reports/console.h"
#include "reports/file_writer.h"

namespace hvd::launcher {

/// Cuts a byte stream into segments that end in "\n", "\r\n" or "\r" (a progress bar that redraws
/// its line). Keeps the terminators, so that the segments add up to the stream. Pure. Not
/// thread-safe.
class LineSplitter {
 public:
  /// An unfinished line longer than `max_segment` bytes is returned in parts of whole characters.
  explicit LineSplitter(std::size_t max_segment = 64 * 1024) : max_segment_(max_segment) {}

  std::vector<std::string> feed(std::string_view bytes);
  /// The unfinished line without an incomplete UTF-8 character at its end.
  std::string flush_partial();
  /// The unfinished line as a whole, at the end of the stream.
  std::string flush();
  bool has_partial() const noexcept { return !partial_.empty(); }

 private:
  std::size_t max_segment_;
  std::string partial_;
};

/// The number of bytes of an incomplete UTF-8 character at the end of `bytes`.
std::size_t unfinished_character(std::string_view bytes);

/// The last lines of a stream, as they would appear on a terminal: "\r" overwrites the line. Omits
/// backtraces, which would push out all other lines. Not thread-safe.
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

struct OutputOptions {
  bool tag = true;
  int tail_lines = 20;
  bool of_worker = false;  ///< the number is the id of a worker of an elastic job
  std::optional<std::filesystem::path> folder =
      {};  ///< for DIR/rank.N/{stdout,stderr}, or worker.N
  /// By stream: whether it is shown on the console, and the file that it is written to, if any.
  std::array<bool, 2> shown = {true, true};
  std::array<std::optional<std::filesystem::path>, 2> logs = {};
};

/// "rank.0"; padded, so that names sort: "rank.07" of 16 ranks.
std::string rank_folder(int rank, int size);
/// "[0] "; padded, so that the lines of all ranks start in the same column.
std::string rank_prefix(int rank, int size);
/// "[w3] ".
std::string worker_prefix(int worker);

/// Distributes one rank's output: tagged lines to the console, all bytes to the rank's files, and
/// the tail of stderr to the final message. Not thread-safe.
class RankOutput {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  /// On a terminal, an unfinished line (a prompt, a row of dots) is shown after this time.
  static constexpr std::chrono::milliseconds kPartialDelay{100};

  /// `console` and `files` must outlive this. @throws LaunchError (kUsage) when the files cannot be
  /// made.
  RankOutput(int rank, int size, const OutputOptions& options, Console& console, FileWriter& files);

  void feed(Stream stream, std::string_view bytes, TimePoint now);
  /// Shows unfinished lines that are due, and returns when the next one is due.
  std::optional<TimePoint> show_partial(TimePoint now);
  /// Writes all remaining output, after the rank has ended.
  void finish();
  std::vector<std::string> stderr_tail() const { return tail_.lines(); }

 private:
  struct StreamOutput {
    LineSplitter splitter;
    std::vector<std::size_t> files;
    TimePoint last_fed{};
  };
  void show(Stream stream, const std::string& segment);
  int owner(Stream stream) const { return 2 * rank_ + static_cast<int>(stream); }
  bool shows_partial(Stream stream) const { return !tag_ || console_.is_terminal(stream); }

  const int rank_;
  const bool tag_;
  const std::array<bool, 2> shown_;
  const std::string prefix_;
  Console& console_;
  FileWriter& files_;
  StreamOutput outputs_[2];
  TailBuffer tail_;
};

}  // namespace hvd::launcher
