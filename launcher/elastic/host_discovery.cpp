#include "elastic/host_discovery.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include "base/text.h"
#include "system/error.h"
#include "system/process.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Interval between checks of a script that the caller waits for, and of the size of its output.
constexpr milliseconds kPollInterval{5};
constexpr milliseconds kSizeCheckInterval{20};

UniqueFd memory_file() {
  UniqueFd file(::memfd_create("hvdrun", MFD_CLOEXEC));
  if (!file)
    throw DiscoveryError(text("no descriptor is left for its output: ", std::strerror(errno)));
  return file;
}

std::string content(const UniqueFd& file) {
  std::string bytes;
  std::array<char, 16 * 1024> buffer;
  for (;;) {
    const ssize_t count =
        ::pread(file.get(), buffer.data(), buffer.size(), static_cast<off_t>(bytes.size()));
    if (count <= 0) return bytes;
    bytes.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

std::size_t size_of(const UniqueFd& file) {
  struct stat status {};
  return ::fstat(file.get(), &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
}

std::string last_line(const std::string& lines) {
  const std::string_view all = trim(lines);
  const std::size_t newline = all.rfind('\n');
  return std::string(newline == all.npos ? all : trim(all.substr(newline + 1)));
}

}  // namespace

std::vector<Host> parse_discovered_hosts(std::string_view printed, int slots) {
  std::vector<Host> hosts;
  int number = 0;
  for (const std::string_view raw : split_text(printed, '\n')) {
    ++number;
    const std::string_view line = trim(raw);
    if (line.empty()) continue;
    const auto host = parse_host(line, slots);
    if (!host || host->slots > kMaxSlotsPerHost) {
      throw DiscoveryError(text("line ", number,
                                " of its output: expected HOST or HOST:SLOTS with 1 to ",
                                kMaxSlotsPerHost, " slots, got '", line, "'"));
    }
    add_host(hosts, *host);
  }
  return hosts;
}

HostDiscovery::HostDiscovery(std::vector<std::string> command, int slots, milliseconds limit)
    : command_(std::move(command)), slots_(slots), limit_(limit) {}

void HostDiscovery::start(Deadline now) {
  out_ = memory_file();
  err_ = memory_file();
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  SpawnOptions options;
  options.argv = command_;
  options.environment = current_environment();
  options.stdin_fd = no_input.get();
  options.stdout_fd = out_.get();
  options.stderr_fd = err_.get();
  options.parent_death_signal = SIGKILL;
  options.own_process_group = true;
  SpawnResult spawned;
  try {
    spawned = spawn(options);
  } catch (const LaunchError& error) {
    throw DiscoveryError(error.what());
  }
  if (spawned.error != 0) {
    throw DiscoveryError(text("it cannot be run: ", std::strerror(spawned.error),
                              spawned.error == EACCES ? "; see chmod +x" : ""));
  }
  pid_ = spawned.pid;
  ends_at_ = now + limit_;
}

/// Also ends the processes that the script has left behind.
void HostDiscovery::end_run() {
  if (pid_ <= 0) return;
  ::kill(-pid_, SIGKILL);
  former_.push_back(std::exchange(pid_, -1));
  reap();
}

/// A process in an uninterruptible sleep ends later.
void HostDiscovery::reap() {
  std::erase_if(former_, [](pid_t former) { return try_wait(former).has_value(); });
}

bool HostDiscovery::prints_too_much() const {
  return size_of(out_) > kMaxOutputBytes || size_of(err_) > kMaxOutputBytes;
}

std::optional<std::vector<Host>> HostDiscovery::step(Deadline now) {
  reap();
  if (pid_ <= 0) {
    if (now < starts_at_) return std::nullopt;
    starts_at_ = now + kPause;
    if (!former_.empty()) return std::nullopt;
    start(now);
  }
  const auto end = peek_exit(pid_);
  const bool too_much = prints_too_much();
  size_check_at_ = now + kSizeCheckInterval;
  if (!end && !too_much && now < ends_at_) return std::nullopt;
  starts_at_ = now + kPause;
  end_run();
  if (too_much) throw DiscoveryError("it has printed more than 1 MiB");
  if (!end) throw DiscoveryError(text("it has not ended within ", limit_));
  if (end->code != 0) {
    const std::string reason = last_line(content(err_));
    throw DiscoveryError(text(end->signal != 0 ? text("it was killed by signal ", end->signal)
                                               : text("it has ended with code ", end->code),
                              reason.empty() ? "" : ": ", reason));
  }
  return parse_discovered_hosts(content(out_), slots_);
}

std::vector<Host> HostDiscovery::run() {
  for (;;) {
    if (auto hosts = step(steady_clock::now())) return *std::move(hosts);
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace hvd::launcher
