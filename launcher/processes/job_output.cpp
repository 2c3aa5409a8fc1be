#include "processes/job_output.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// The ranks must wait while the backlog of the console or of the files is larger.
constexpr std::size_t kMaxPending = 4 << 20;
constexpr std::size_t kMaxPendingInFiles = 64 << 20;
/// How long to wait for a reader that does not read: after a failure, and after a second signal.
constexpr milliseconds kReaderTimeout{10'000};
constexpr milliseconds kHurriedTimeout{1000};
constexpr milliseconds kEndStep{100};

}  // namespace

Welcome terminal_size(int prefix) {
  winsize size{};
  if (::isatty(STDOUT_FILENO) != 1 || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return {};
  return {.columns = std::max(0, size.ws_col - prefix), .rows = size.ws_row};
}

JobOutput::JobOutput(asio::io_context& io, Handlers handlers)
    : io_(io),
      handlers_(std::move(handlers)),
      console_(io, STDOUT_FILENO, STDERR_FILENO),
      files_(io) {}

bool JobOutput::has_room() const {
  return console_.pending() < kMaxPending && files_.pending() < kMaxPendingInFiles;
}

void JobOutput::print_line(const std::string& line) {
  console_.write(Stream::kStderr, Console::kNoOwner, text("hvdrun: ", line, "\n"));
}

void JobOutput::report_failures() {
  for (const std::string& failure : files_.collect_failures()) report_lost(failure);
  for (const Stream stream : {Stream::kStdout, Stream::kStderr}) {
    const auto error = console_.failure(stream);
    bool& reported = failure_reported_[static_cast<int>(stream)];
    if (!error || reported) continue;
    reported = true;
    const std::string name = stream == Stream::kStdout ? "stdout" : "stderr";
    if (*error == EPIPE) {
      handlers_.reader_gone(name);
    } else {
      report_lost(text("cannot write ", name, ": ", std::strerror(*error),
                       "; the ranks' output to it is lost from here on"));
    }
  }
}

void JobOutput::report_lost(const std::string& message) {
  handlers_.lost();
  print_line(message);
}

void JobOutput::write_files(const bool& hurried) {
  while (files_.pending() > 0) {
    io_.run_one_for(kEndStep);
    const milliseconds timeout = hurried ? kHurriedTimeout : kReaderTimeout;
    for (const std::string& failure : files_.collect_failures(timeout)) report_lost(failure);
  }
  report_failures();
}

void JobOutput::write_out(bool failed, const bool& hurried) {
  std::size_t seen = console_.progress();
  Clock::time_point last = Clock::now();
  bool leaving = failed;
  while (console_.pending() > 0) {
    const milliseconds timeout = hurried ? kHurriedTimeout : kReaderTimeout;
    if (leaving && Clock::now() - last >= timeout) break;
    io_.run_one_for(kEndStep);
    if (hurried && !leaving) {
      leaving = true;
      handlers_.lost();
    }
    report_failures();
    if (console_.progress() != seen) {
      seen = console_.progress();
      last = Clock::now();
    }
  }
  if (!console_.is_stuck(Stream::kStdout) || console_.shares(Stream::kStdout, Stream::kStderr))
    return;
  print_line(text("stdout has no active reader: ", console_.drop(Stream::kStdout),
                  " bytes of the ranks' output were dropped"));
  const auto end = Clock::now() + kHurriedTimeout;
  while (console_.pending() > 0 && io_.run_one_until(end) > 0) {
  }
}

}  // namespace hvd::launcher
