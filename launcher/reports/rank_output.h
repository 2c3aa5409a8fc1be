#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reports/console.h"
#include "reports/file_writer.h"
#include "reports/line_splitter.h"

namespace hvd::launcher {

struct OutputOptions {
  bool tag = true;
  int tail_lines = 20;
  std::optional<std::filesystem::path> folder;  ///< for DIR/rank.N/{stdout,stderr}
};

/// "rank.0", padded so that names sort: "rank.07" of 16.
std::string rank_folder(int rank, int size);
/// "[0] ", padded so that the lines of all ranks start in one column.
std::string rank_prefix(int rank, int size);

/// Distributes one rank's output: to the console, line by line and tagged; to its files, byte for
/// byte; the tail of its stderr to the final message. Not thread-safe.
class RankOutput {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  /// On a terminal a line without an end (a prompt, a row of dots) is shown after this time.
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
  struct Channel {
    LineSplitter splitter;
    std::optional<std::size_t> file;
    TimePoint last_fed{};
  };
  void show(Stream stream, const std::string& segment);
  int owner(Stream stream) const { return 2 * rank_ + static_cast<int>(stream); }
  bool shows_partial(Stream stream) const { return !tag_ || console_.is_terminal(stream); }

  const int rank_;
  const bool tag_;
  const std::string prefix_;
  Console& console_;
  FileWriter& files_;
  Channel channels_[2];
  TailBuffer tail_;
};

}  // namespace hvd::launcher
