#include "agent/rank_process.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <system_error>
#include <utility>

#include "command/rank_environment.h"
#include "system/error.h"
#include "system/event_loop.h"
#include "system/process.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kReadSize = 64 * 1024;
/// The delay between a request to stop that hvdrun has not sent, and SIGTERM to the program. Under
/// mpirun a program that called MPI_Abort is about to exit with its own code, which a SIGTERM would
/// hide. The order from hvdrun usually arrives sooner.
constexpr milliseconds kStopDelay{100};
/// How long to wait for output of processes that the program left behind and that hold its pipes
/// open.
constexpr milliseconds kDrainTime{200};

}  // namespace

RankProcess::RankProcess(asio::io_context& io, int rank, Program program, bool has_rendezvous,
                         Link& link)
    : rank_(rank),
      program_(std::move(program)),
      link_(link),
      notices_(io, [this] { relay_notices(); }),
      outputs_{{FrameType::kStdout, asio::posix::stream_descriptor(io)},
               {FrameType::kStderr, asio::posix::stream_descriptor(io)}} {
  if (!has_rendezvous) return;
  rendezvous_.emplace(
      io, [this](const RendezvousBytes& bytes) { send(FrameType::kRendezvous, encode(bytes)); },
      [this] { return link_.has_room(); });
}

void RankProcess::welcome(const Welcome& welcome, long long clock_offset_ns) {
  welcome_ = welcome;
  credit_ = welcome.credit;
  clock_offset_ns_ = clock_offset_ns;
}

UniqueFd RankProcess::open_stdout(UniqueFd& program_end) const {
  if (program_.use_terminal) {
    UniqueFd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    std::array<char, 64> name{};
    if (master && ::grantpt(master.get()) == 0 && ::unlockpt(master.get()) == 0 &&
        ::ptsname_r(master.get(), name.data(), name.size()) == 0) {
      program_end = UniqueFd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
      termios mode{};
      if (program_end && ::tcgetattr(program_end.get(), &mode) == 0) {
        ::cfmakeraw(&mode);
        ::tcsetattr(program_end.get(), TCSANOW, &mode);
        winsize size{};
        size.ws_col = static_cast<unsigned short>(welcome_.columns);
        size.ws_row = static_cast<unsigned short>(welcome_.rows);
        ::ioctl(program_end.get(), TIOCSWINSZ, &size);
        return master;
      }
    }
  }
  Pipe pipe = make_pipe();
  program_end = std::move(pipe.write_end);
  return std::move(pipe.read_end);
}

void RankProcess::start(StartOrder order) {
  if (pid_ > 0 || ended_) return;
  SpawnResult result;
  try {
    UniqueFd program_stdout;
    UniqueFd output = open_stdout(program_stdout);
    Pipe errors = make_pipe();
    SpawnOptions options;
    options.argv = program_.argv;
    options.environment =
        program_.make_environment(order, rendezvous_ ? "hvdrun://" + rendezvous_->name() : "");
    if (!notices_.name().empty())
      set_variable(options.environment, kNoticeVariable, notices_.name());
    options.stdin_fd = program_.stdin_fd;
    options.stdout_fd = program_stdout.get();
    options.stderr_fd = errors.write_end.get();
    options.parent_death_signal = SIGKILL;
    options.own_process_group = true;
    options.inherited_fd = program_.inherited_fd;
    options.cpus = program_.cpus;
    assign(outputs_[0], std::move(output));
    assign(outputs_[1], std::move(errors.read_end));
    result = spawn(options);
  } catch (const LaunchError&) {  // no descriptors or processes are left on this host
    result.error = errno != 0 ? errno : EAGAIN;
  } catch (const std::system_error& error) {
    result.error = error.code().value();
  }
  if (result.error == 0) {
    pid_ = result.pid;
    for (Output& output : outputs_) wait(output);
    return send(FrameType::kStarted, encode(ProgramStarted{.pid = pid_}));
  }
  close_outputs();
  const ExitCode code = result.error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun;
  end_without_program({.code = static_cast<int>(code), .start_error = result.error});
}

/// @throws std::system_error when the loop cannot watch one more descriptor
void RankProcess::assign(Output& output, UniqueFd pipe) {
  set_nonblocking(pipe.get());
  output.pipe.assign(pipe.get());
  pipe.release();
}

void RankProcess::close_outputs() {
  asio::error_code ignored;
  for (Output& output : outputs_) output.pipe.close(ignored);
}

void RankProcess::wait(Output& output) {
  if (!output.pipe.is_open() || credit_ <= 0 || std::exchange(output.waiting, true)) return;
  output.pipe.async_wait(asio::posix::descriptor_base::wait_read,
                         [this, &output](const asio::error_code& error) {
                           output.waiting = false;
                           if (error) return;
                           relay(output);
                           wait(output);
                         });
}

bool RankProcess::relay(Output& output) {
  if (!output.pipe.is_open() || credit_ <= 0) return false;
  static std::array<char, kReadSize> buffer;
  const auto wanted = std::min(buffer.size(), static_cast<std::size_t>(credit_));
  const ssize_t count = ::read(output.pipe.native_handle(), buffer.data(), wanted);
  if (count > 0) {
    if (connected_) credit_ -= count;
    send(output.type, {buffer.data(), static_cast<std::size_t>(count)});
    return true;
  }
  // A pseudo-terminal returns EIO where a pipe returns end of file.
  if (count == 0 || (errno != EINTR && errno != EAGAIN)) output.pipe.close();
  return false;
}

void RankProcess::on_frame(const Frame& frame) {
  if (frame.type == FrameType::kRelease) {
    released_ = true;
  } else if (frame.type == FrameType::kStart) {
    start(decode<StartOrder>(frame.payload));
  } else if (frame.type == FrameType::kRendezvousReply) {
    if (rendezvous_) rendezvous_->reply(decode_rendezvous(frame.payload));
  } else if (frame.type == FrameType::kCredit) {
    credit_ += decode<Credit>(frame.payload).bytes;
    for (Output& output : outputs_) wait(output);
  } else if (frame.type == FrameType::kSignal) {
    const SignalOrder order = decode<SignalOrder>(frame.payload);
    if (order.stop && order.after_ms > 0) {
      stop_later(order);
    } else if (order.stop) {
      stop(order.signal, order.kill_after_ms);
    } else {
      pass_on(order.signal);
    }
  }
}

void RankProcess::on_connection_lost() {
  connected_ = false;
  if (rendezvous_) rendezvous_->close();
  credit_ = std::numeric_limits<int>::max();  // output that is read from here on is dropped
  for (Output& output : outputs_) wait(output);
  if (!ended_) stop(SIGTERM, static_cast<int>(program_.orphan_grace.count()));
}

void RankProcess::on_signal(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) {
    pass_on(signal);
  } else if (!stopped_) {
    stop_later({.signal = SIGTERM,
                .after_ms = static_cast<int>(kStopDelay.count()),
                .stop = true,
                .kill_after_ms = static_cast<int>(program_.orphan_grace.count())});
  }
}

std::optional<Deadline> RankProcess::next_deadline() const {
  std::optional<Deadline> next = stop_at_;
  keep_earlier(next, kill_at_);
  if (!drained_ && credit_ > 0) keep_earlier(next, drain_until_);
  return next;
}

void RankProcess::step() {
  const Deadline now = Clock::now();
  if (kill_at_ && now >= *kill_at_) {
    kill_at_.reset();
    signal_program(SIGKILL);
  }
  if (stop_at_ && now >= *stop_at_) {
    stop_at_.reset();
    stop(later_.signal, later_.kill_after_ms);
  }
  if (rendezvous_) rendezvous_->resume();
  report_if_ended();
  finish_output();
}

void RankProcess::relay_notices() {
  while (auto notice = notices_.next()) {
    notice->stopped = stopped_;
    notice->time_ns += clock_offset_ns_;
    send(FrameType::kNotice, encode(*notice));
  }
}

void RankProcess::detect_end() {
  if (ended_ || pid_ < 0) return;
  const auto status = peek_exit(pid_);
  if (!status) return;
  relay_notices();
  if (rendezvous_) rendezvous_->read_all();
  program_.on_end();
  ended_ = Ended{.time_ns = realtime_ns() + clock_offset_ns_,
                 .pid = pid_,
                 .code = status->code,
                 .signal = status->signal,
                 .dumped_core = status->dumped_core,
                 .stopped = stopped_};
  kill_at_.reset();
  stop_at_.reset();
  drain_until_ = Clock::now() + kDrainTime;
}

void RankProcess::end_without_program(Ended ended) {
  ended.time_ns = realtime_ns() + clock_offset_ns_;
  ended_ = ended;
  drain_until_ = Clock::now();
}

/// Reports the end after the output, so that hvdrun has the last lines when it receives the report.
/// The report must not wait for a slow reader of hvdrun's output.
void RankProcess::report_if_ended() {
  if (reported_ || !ended_) return;
  const bool waits = !program_.reports_at_once && has_output();
  if (waits && Clock::now() < *drain_until_ && credit_ > 0) return;
  reported_ = true;
  send(FrameType::kEnded, encode(*ended_));
}

void RankProcess::finish_output() {
  if (drained_ || !reported_) return;
  if (has_output()) {
    // A pipe that was not read for lack of credit may still hold output, so read it first.
    if (Clock::now() < *drain_until_ || credit_ <= 0) return;
    if (pid_ > 0) ::kill(-pid_, SIGKILL);
    const bool read_stdout = relay(outputs_[0]);
    const bool read_stderr = relay(outputs_[1]);
    if (read_stdout || read_stderr || credit_ <= 0) return;
  }
  drained_ = true;
  close_outputs();
  send(FrameType::kDrained, "{}");
}

void RankProcess::stop_later(const SignalOrder& order) {
  const Deadline at = Clock::now() + milliseconds(order.after_ms);
  if (stop_at_ && *stop_at_ <= at) return;
  stop_at_ = at;
  later_ = order;
}

void RankProcess::stop(int signal, int kill_after_ms) {
  relay_notices();  // notices and an end before the stop are the program's own
  detect_end();
  stopped_ = true;
  stop_at_.reset();
  if (pid_ < 0 && !ended_)
    return end_without_program({.code = 128 + signal, .signal = signal, .stopped = true});
  signal_program(signal);
  if (kill_after_ms >= 0) keep_earlier(kill_at_, Clock::now() + milliseconds(kill_after_ms));
}

/// Passes a signal on to the program. SIGUSR1, which requests a state dump, goes only to processes
/// that have a handler for it now, because it would end the others.
void RankProcess::pass_on(int signal) const {
  if (signal != SIGUSR1) return signal_program(signal);
  if (pid_ <= 0 || ended_) return;
  for (const pid_t member : group_members(pid_)) {
    if (handles(member, signal)) ::kill(member, signal);
  }
}

void RankProcess::signal_program(int signal) const {
  if (pid_ > 0 && !ended_) ::kill(-pid_, signal);
}

void RankProcess::clean_up() {
  if (rendezvous_) rendezvous_->close();
  if (pid_ <= 0) return;
  // The program itself is still a zombie, so no other group can have this number.
  ::kill(-pid_, SIGKILL);
  try_wait(std::exchange(pid_, -1));
}

}  // namespace hvd::launcher
