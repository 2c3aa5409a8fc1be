#include "hvd/torch/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "hvd/hvd.h"

namespace hvd {
namespace {

constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::minutes kMaxLineInterval{1};

bool ends_on_terminal(std::FILE* file) {
  // Under hvdrun standard output is a pipe or a pseudo-terminal; the launcher sets a variable if it
  // writes to a terminal itself.
  const char* const launcher = file == stdout ? std::getenv("HVD_OUTPUT_TTY") : nullptr;
  return launcher != nullptr ? std::string_view(launcher) == "1" : isatty(fileno(file)) == 1;
}

std::size_t columns_of(std::FILE* file) {
  winsize size{};
  const bool known = ioctl(fileno(file), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

/// "03:20", or "1:03:20" from an hour on.
std::string clock_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::lround(std::min(seconds, 3.6e9)));
  std::array<char, 32> text{};
  if (whole < 3600) {
    std::snprintf(text.data(), text.size(), "%02d:%02d", static_cast<int>(whole / 60),
                  static_cast<int>(whole % 60));
  } else {
    std::snprintf(text.data(), text.size(), "%lld:%02d:%02d", static_cast<long long>(whole / 3600),
                  static_cast<int>(whole / 60 % 60), static_cast<int>(whole % 60));
  }
  return text.data();
}

/// Three significant digits below 100, and whole numbers above.
std::string rate_text(double rate) {
  std::array<char, 32> text{};
  const char* const format = rate < 1 ? "%.3f" : rate < 10 ? "%.2f" : rate < 100 ? "%.1f" : "%.0f";
  std::snprintf(text.data(), text.size(), format, rate);
  return text.data();
}

}  // namespace

namespace libtorch {

std::string progress_line(const ProgressNumbers& numbers, const std::string& label,
                          const std::string& unit, const std::string& note, std::size_t columns) {
  constexpr std::size_t kLongestBar = 30, kShortestBar = 5;
  const std::int64_t percent = numbers.total > 0 ? 100 * numbers.done / numbers.total : 100;
  const std::string begin = label.empty() ? "" : label + "  ";
  std::string end = std::to_string(std::clamp<std::int64_t>(percent, 0, 100)) + " %";
  end.insert(0, end.size() < 5 ? 5 - end.size() : 0, ' ');
  end += "  " + std::to_string(numbers.done) + "/" + std::to_string(numbers.total) + "  " +
         clock_text(numbers.seconds) + "<" +
         (numbers.remaining < 0 ? "?" : clock_text(numbers.remaining)) + "  " +
         rate_text(numbers.throughput) + " " + unit + "/s";
  if (!note.empty()) end += "  " + note;
  if (columns == 0) return begin + end;
  // Leaves the last column free, because some terminals begin a new line after it.
  const std::size_t other = begin.size() + end.size() + 4;
  std::string bar;
  if (other + kShortestBar <= columns) {
    const std::size_t width = std::min(kLongestBar, columns - other);
    const std::size_t filled =
        width * static_cast<std::size_t>(std::clamp<std::int64_t>(percent, 0, 100)) / 100;
    bar = "[" + std::string(filled, '=') + std::string(width - filled, ' ') + "] ";
  }
  return (begin + bar + end).substr(0, columns - 1);
}

}  // namespace libtorch

ProgressBar::ProgressBar(std::int64_t total, ProgressBarOptions options)
    : total_(total),
      options_(std::move(options)),
      enabled_(options_.enabled && (!is_initialized() || rank() == 0)),
      terminal_(options_.terminal.value_or(enabled_ && ends_on_terminal(options_.file))),
      done_(options_.initial),
      printed_(options_.initial),
      printed_at_(terminal_ ? start_ - kRedraw : start_) {}

ProgressBar::~ProgressBar() {
  if (visible_) std::fputc('\n', options_.file);
}

void ProgressBar::update(std::int64_t done, const std::function<std::string()>& note) {
  done_ = done;
  if (!enabled_ || !is_due(Clock::now())) return;
  note_ = note ? note() : std::string();
  draw();
}

bool ProgressBar::is_due(Clock::time_point now) const {
  if (terminal_) return now - printed_at_ >= kRedraw || done_ >= total_;
  const auto tenth = [this](std::int64_t done) { return total_ > 0 ? 10 * done / total_ : 0; };
  return tenth(done_) != tenth(printed_) || now - printed_at_ >= kMaxLineInterval;
}

void ProgressBar::draw() {
  const Clock::time_point now = Clock::now();
  printed_ = done_;
  printed_at_ = now;
  libtorch::ProgressNumbers numbers{.done = done_,
                                    .total = total_,
                                    .seconds = seconds(),
                                    .remaining = -1,
                                    .throughput = throughput()};
  if (done_ > options_.initial) {
    numbers.remaining = numbers.seconds *
                        static_cast<double>(std::max<std::int64_t>(total_ - done_, 0)) /
                        static_cast<double>(done_ - options_.initial);
  }
  const std::string line = libtorch::progress_line(numbers, options_.label, options_.unit, note_,
                                                   terminal_ ? columns_of(options_.file) : 0);
  std::fprintf(options_.file, terminal_ ? "\r%s\033[K" : "%s\n", line.c_str());
  std::fflush(options_.file);
  visible_ = terminal_;
}

void ProgressBar::erase() {
  if (visible_) std::fputs("\r\033[K", options_.file);
  visible_ = false;
}

void ProgressBar::print(std::string_view line) {
  if (!enabled_) return;
  const bool redraw = visible_;
  erase();
  std::fprintf(options_.file, "%.*s\n", static_cast<int>(line.size()), line.data());
  if (redraw) draw();
  std::fflush(options_.file);
}

void ProgressBar::finish(std::string_view summary) {
  if (!enabled_) return;
  if (!summary.empty()) {
    erase();
    std::fprintf(options_.file, "%.*s\n", static_cast<int>(summary.size()), summary.data());
  } else if (visible_) {
    draw();
    std::fputc('\n', options_.file);
  }
  visible_ = false;
  std::fflush(options_.file);
}

double ProgressBar::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

double ProgressBar::throughput() const {
  const double elapsed = seconds();
  return elapsed > 0
             ? static_cast<double>(done_ - options_.initial) * options_.units_per_step / elapsed
             : 0;
}

}  // namespace hvd
