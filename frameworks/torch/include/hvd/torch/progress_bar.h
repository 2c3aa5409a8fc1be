#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace hvd {

/// @addtogroup train
/// @{

/// Options of a ProgressBar.
struct ProgressBarOptions {
  /// Stands before the bar.
  std::string label = {};
  /// The unit of the throughput.
  std::string unit = "steps";
  /// Units in one step on all ranks together: the throughput is units_per_step times the number of
  /// steps per second.
  double units_per_step = 1;
  /// Steps that were done before, by a resumed run. They do not count for the throughput.
  std::int64_t initial = 0;
  /// false: prints nothing.
  bool enabled = true;
  /// Receives the output.
  std::FILE* file = stdout;
  /// Whether the output ends on a terminal. Not set: determined from the file, and for the standard
  /// output under hvdrun from hvdrun's own.
  std::optional<bool> terminal = {};
};

/// The progress of a loop, printed on rank 0, or in a process that has not called init(). On a
/// terminal it is a bar that is redrawn ten times a second. In a file or a pipe it is a line for
/// each tenth of the steps, and for each minute in which no tenth was completed.
///
///     hvd::ProgressBar bar(images, {.label = "epoch 1", .unit = "images"});
///     for (auto& batch : loader) {
///       ...
///       bar.update(loader.samples_used(), [&] { return std::to_string(loss.item<float>()); });
///     }
///     bar.finish();
///
/// Not thread-safe.
class ProgressBar {
 public:
  /// @param total number of steps at the end, at least 0
  explicit ProgressBar(std::int64_t total, ProgressBarOptions options = {});
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  /// Ends the line of an unfinished bar.
  ~ProgressBar();

  /// Records that `done` of the steps are done.
  /// @param note returns a text for the end of the line. It is only called when a line is printed,
  /// so it may wait for a GPU
  void update(std::int64_t done, const std::function<std::string()>& note = {});
  /// Prints a line above the bar.
  void print(std::string_view line);
  /// Ends the output. @param summary replaces the bar, if it is not empty
  void finish(std::string_view summary = {});

  /// Seconds since the construction.
  double seconds() const;
  /// Units per second since the construction, over all ranks.
  double throughput() const;

 private:
  using Clock = std::chrono::steady_clock;

  bool is_due(Clock::time_point now) const;
  void draw();
  void erase();

  const std::int64_t total_;
  const ProgressBarOptions options_;
  const bool enabled_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  std::int64_t done_;
  std::int64_t printed_;  ///< done_ when the last line was printed
  Clock::time_point printed_at_;
  std::string note_;
  bool visible_ = false;  ///< a bar is on the current line of the terminal
};

/// @}

namespace libtorch {

/// The numbers that a ProgressBar prints.
struct ProgressNumbers {
  std::int64_t done = 0, total = 0;
  double seconds = 0;     ///< since the beginning
  double remaining = 0;   ///< seconds to the end; negative: not known
  double throughput = 0;  ///< units per second
};

/// One line, without a newline. @param columns width of the terminal; 0: no bar, any width
std::string progress_line(const ProgressNumbers& numbers, const std::string& label,
                          const std::string& unit, const std::string& note, std::size_t columns);

}  // namespace libtorch

}  // namespace hvd
