// The only file that includes spdlog, because spdlog's fmt and LibTorch's fmt cannot be in one
// translation unit.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"

namespace hvd {
namespace {

std::atomic<int> g_level{-1};  // -1: the environment has not been read yet

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kFatal:
      return spdlog::level::critical;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::off;
}

struct Sink {
  Mutex mutex;  // one thread at a time sets the pattern
  std::shared_ptr<spdlog::logger> logger;

  Sink()
      : logger(std::make_shared<spdlog::logger>(
            "hvd", std::make_shared<spdlog::sinks::stderr_sink_mt>())) {
    logger->set_level(spdlog::level::trace);
    logger->flush_on(spdlog::level::trace);
    set_origin(text("pid ", ::getpid()));
  }

  void set_origin(const std::string& origin) HVD_REQUIRES(mutex) {
    std::string escaped;
    for (const char c : origin) escaped += c == '%' ? std::string("%%") : std::string(1, c);
    logger->set_pattern("%Y-%m-%d %H:%M:%S.%e hvd %l [" + escaped + "] %v");
  }
};

// Never destroyed: threads and atexit handlers may log while statics are torn down.
Sink& sink() {
  static Sink* const instance = new Sink;
  return *instance;
}

// hvd::init() checks all variables and refuses an invalid value. Lines before that use the default.
LogLevel level_of_environment() noexcept {
  static constexpr const char* kNames[] = {"trace", "debug", "info", "warning",
                                           "error", "fatal", "off"};
  try {
    const std::string text = env_choice("LOG_LEVEL").value_or("warning");
    for (int i = 0; i < 7; ++i) {
      if (text == kNames[i]) return static_cast<LogLevel>(i);
    }
  } catch (const std::exception&) {
  }
  return LogLevel::kWarning;
}

}  // namespace

void configure_log_from_environment() {
  g_level.store(static_cast<int>(level_of_environment()), std::memory_order_relaxed);
}

LogLevel log_level() noexcept {
  const int level = g_level.load(std::memory_order_relaxed);
  if (level >= 0) return static_cast<LogLevel>(level);
  configure_log_from_environment();
  return static_cast<LogLevel>(g_level.load(std::memory_order_relaxed));
}

void log_message(LogLevel level, std::string_view message) {
  sink().logger->log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

void set_log_identity(int rank, std::string_view host) {
  const MutexLock lock(sink().mutex);
  sink().set_origin(text("rank ", rank, " ", host));
}

}  // namespace hvd
