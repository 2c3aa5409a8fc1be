#include "processes/rank_supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>

#include "base/sha256.h"
#include "command/rank_environment.h"
#include "system/error.h"
#include "system/poller.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kReadSize = 64 * 1024;
/// If more bytes are queued for hvdrun, the program waits, as for a slow reader of its pipe.
constexpr std::size_t kMaxOutgoing = 1 << 20;
/// The delay between mpirun's request to stop this rank and SIGTERM to the program. A program that
/// called MPI_Abort is about to exit with its own code, which a SIGTERM would hide. hvdrun usually
/// sends its own order sooner.
constexpr milliseconds kStopDelay{100};
constexpr int kOrphanGraceMs = 500;
/// How long to wait for output of processes that the program left behind and that hold its pipes
/// open.
constexpr milliseconds kDrainTime{200};

constexpr std::array kSupervised = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/// Waits for the next frame. Empty if the peer has closed the connection or is too slow.
std::optional<Frame> await_frame(int fd, FrameDecoder& decoder,
                                 std::chrono::steady_clock::time_point deadline) {
  while (true) {
    if (auto frame = decoder.next()) return frame;
    const auto left =
        std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd readable{fd, POLLIN, 0};
    if (left <= 0) return std::nullopt;
    if (::poll(&readable, 1, static_cast<int>(left)) <= 0) continue;
    std::array<char, 4096> buffer;
    const ssize_t count = ::recv(fd, buffer.data(), buffer.size(), 0);
    if (count <= 0) return std::nullopt;
    decoder.feed({buffer.data(), static_cast<std::size_t>(count)});
  }
}

bool send_frame(int fd, FrameType type, const std::string& payload) {
  std::string bytes;
  append_frame(bytes, type, payload);
  return send_some(fd, bytes) == static_cast<std::ptrdiff_t>(bytes.size());
}

/// Estimates the offset of the other clock. The other side wrote the reply between `sent_ns` and
/// `received_ns`, so an offset of at most half of that interval counts as zero.
long long offset_of(long long sent_ns, long long received_ns, long long theirs_ns) {
  const long long offset = theirs_ns - (sent_ns + (received_ns - sent_ns) / 2);
  const long long doubt = (received_ns - sent_ns + 1) / 2;
  return std::abs(offset) <= doubt ? 0 : offset;
}

}  // namespace

std::optional<LauncherConnection> introduce(UniqueFd fd, Hello hello, const std::string& token,
                                            bool same_clock, int timeout_ms) {
  LauncherConnection connection;
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(timeout_ms);
  try {
    const std::string nonce = random_token();
    if (!send_frame(fd.get(), FrameType::kGreeting,
                    encode(Greeting{.rank = hello.rank, .nonce = nonce})))
      return std::nullopt;
    auto frame = await_frame(fd.get(), connection.decoder, deadline);
    if (!frame || frame->type != FrameType::kChallenge) return std::nullopt;
    const Challenge challenge = decode<Challenge>(frame->payload);
    if (!same_secret(challenge.proof, launcher_proof(token, nonce, challenge.nonce)))
      return std::nullopt;
    hello.proof = supervisor_proof(token, nonce, challenge.nonce, hello.rank);
    const long long sent = realtime_ns();
    if (!send_frame(fd.get(), FrameType::kHello, encode(hello))) return std::nullopt;
    frame = await_frame(fd.get(), connection.decoder, deadline);
    if (!frame || frame->type != FrameType::kWelcome) return std::nullopt;
    connection.welcome = decode<Welcome>(frame->payload);
    if (!same_clock)
      connection.clock_offset_ns = offset_of(sent, realtime_ns(), connection.welcome.time_ns);
  } catch (const ProtocolError&) {
    return std::nullopt;
  }
  connection.fd = std::move(fd);
  set_nonblocking(connection.fd.get());
  return connection;
}

sigset_t supervised_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : kSupervised) ::sigaddset(&signals, signal);
  return signals;
}

RankSupervisor::RankSupervisor(LauncherConnection connection,
                               std::optional<RendezvousSocket> rendezvous, bool use_terminal)
    : connection_(std::move(connection)),
      use_terminal_(use_terminal),
      rendezvous_(std::move(rendezvous)),
      credit_(connection_.welcome.credit) {}

int RankSupervisor::run(const std::vector<std::string>& program, const MakeEnvironment& environment,
                        const std::vector<int>& cpus) {
  const sigset_t signals = supervised_signals();
  signals_ = UniqueFd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  process_frames();  // frames may have arrived together with the welcome
  while (!done()) {
    if (start_ && program_ < 0 && !ended_) start(program, environment, cpus);
    wait_for_events();
    on_timers();
    detect_end();
    report_if_ended();
    finish_output();
  }
  // Processes that the program left running in its group would otherwise outlive the job. The
  // program itself is still a zombie, so no other group can have this number.
  if (program_ > 0) ::kill(-program_, SIGKILL);
  return ended_ ? ended_->code : static_cast<int>(ExitCode::kInternal);
}

UniqueFd RankSupervisor::open_stdout(UniqueFd& program_end) const {
  if (use_terminal_) {
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
        size.ws_col = static_cast<unsigned short>(connection_.welcome.columns);
        size.ws_row = static_cast<unsigned short>(connection_.welcome.rows);
        ::ioctl(program_end.get(), TIOCSWINSZ, &size);
        return master;
      }
    }
  }
  Pipe pipe = make_pipe();
  program_end = std::move(pipe.write_end);
  return std::move(pipe.read_end);
}

void RankSupervisor::start(const std::vector<std::string>& program,
                           const MakeEnvironment& environment, const std::vector<int>& cpus) {
  StartOrder order = *start_;
  if (order.address.empty() && connection_.fd) order.address = peer_address(connection_.fd.get());
  UniqueFd program_stdout;
  stdout_ = open_stdout(program_stdout);
  Pipe errors = make_pipe();
  stderr_ = std::move(errors.read_end);
  set_nonblocking(stdout_.get());
  set_nonblocking(stderr_.get());

  SpawnOptions options;
  options.argv = program;
  options.environment = environment(order);
  if (notices_.fd() >= 0) set_variable(options.environment, kNoticeVariable, notices_.name());
  options.stdout_fd = program_stdout.get();
  options.stderr_fd = errors.write_end.get();
  options.parent_death_signal = SIGKILL;
  options.own_process_group = true;
  options.cpus = cpus;
  const SpawnResult result = spawn(options);
  if (result.error == 0) {
    program_ = result.pid;
    append_frame(outgoing_, FrameType::kStarted, encode(ProgramStarted{.pid = program_}));
    return;
  }
  const ExitCode code = result.error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun;
  ended_ = Ended{.time_ns = realtime_ns() + connection_.clock_offset_ns,
                 .code = static_cast<int>(code),
                 .start_error = result.error};
  drain_until_ = Clock::now();
}

void RankSupervisor::wait_for_events() {
  Poller poller;
  poller.add(signals_.get(), POLLIN, [this](short) { on_signals(); });
  if (notices_.fd() >= 0) poller.add(notices_.fd(), POLLIN, [this](short) { relay_notices(); });
  if (rendezvous_ && outgoing_.size() < kMaxOutgoing) rendezvous_->add_to(poller);
  if (connection_.fd) {
    const short events = static_cast<short>(outgoing_.empty() ? POLLIN : POLLIN | POLLOUT);
    poller.add(connection_.fd.get(), events, [this](short) { on_hvdrun_readable(); });
  }
  if (stdout_ && may_read())
    poller.add(stdout_.get(), POLLIN, [this](short) { relay(stdout_, FrameType::kStdout); });
  if (stderr_ && may_read())
    poller.add(stderr_.get(), POLLIN, [this](short) { relay(stderr_, FrameType::kStderr); });
  poller.wait_until(next_deadline());
  relay_rendezvous();
  flush();
}

std::optional<RankSupervisor::TimePoint> RankSupervisor::next_deadline() const {
  std::optional<TimePoint> next = stop_at_;
  keep_earlier(next, kill_at_);
  if (!drained_ && may_read()) keep_earlier(next, drain_until_);
  return next;
}

void RankSupervisor::on_timers() {
  const TimePoint now = Clock::now();
  if (kill_at_ && now >= *kill_at_) {
    kill_at_.reset();
    signal_program(SIGKILL);
  }
  if (stop_at_ && now >= *stop_at_) {
    stop_at_.reset();
    stop(later_.signal, later_.kill_after_ms);
  }
}

void RankSupervisor::on_signals() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGUSR1 || signal == SIGUSR2) {
      pass_on(signal);
    } else if (signal != SIGCHLD && !stopped_) {
      stop_later({.signal = SIGTERM,
                  .after_ms = static_cast<int>(kStopDelay.count()),
                  .stop = true,
                  .kill_after_ms = kOrphanGraceMs});
    }
  }
}

void RankSupervisor::on_hvdrun_readable() {
  if (!connection_.fd) return;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = ::recv(connection_.fd.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) return on_connection_lost();
    connection_.decoder.feed({buffer.data(), static_cast<std::size_t>(count)});
    process_frames();
    if (!connection_.fd) return;
  }
}

void RankSupervisor::process_frames() {
  try {
    while (const auto frame = connection_.decoder.next()) on_hvdrun_frame(*frame);
  } catch (const ProtocolError&) {
    on_connection_lost();
  }
}

void RankSupervisor::on_hvdrun_frame(const Frame& frame) {
  if (frame.type == FrameType::kRelease) {
    released_ = true;
  } else if (frame.type == FrameType::kStart) {
    start_ = decode<StartOrder>(frame.payload);
  } else if (frame.type == FrameType::kRendezvousReply) {
    if (rendezvous_) rendezvous_->reply(decode_rendezvous(frame.payload));
  } else if (frame.type == FrameType::kCredit) {
    credit_ += decode<Credit>(frame.payload).bytes;
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

void RankSupervisor::on_connection_lost() {
  connection_.fd.reset();
  if (rendezvous_) rendezvous_->close_all();
  outgoing_.clear();
  credit_ = std::numeric_limits<int>::max();  // output that is read from here on is dropped
  if (!ended_) stop(SIGTERM, kOrphanGraceMs);
}

bool RankSupervisor::relay(UniqueFd& from, FrameType type) {
  if (!from) return false;
  static std::array<char, kReadSize> buffer;
  if (credit_ <= 0) return false;
  const auto wanted = std::min(buffer.size(), static_cast<std::size_t>(credit_));
  const ssize_t count = ::read(from.get(), buffer.data(), wanted);
  if (count > 0) {
    if (connection_.fd) {
      append_frame(outgoing_, type, {buffer.data(), static_cast<std::size_t>(count)});
      credit_ -= count;
    }
    return true;
  }
  // A pseudo-terminal returns EIO where a pipe returns end of file.
  if (count == 0 || (errno != EINTR && errno != EAGAIN)) from.reset();
  return false;
}

void RankSupervisor::flush() {
  if (!connection_.fd) return;
  const auto sent = send_some(connection_.fd.get(), outgoing_);
  if (sent < 0) return on_connection_lost();
  outgoing_.erase(0, static_cast<std::size_t>(sent));
}

void RankSupervisor::relay_notices() {
  while (auto notice = notices_.next()) {
    notice->stopped = stopped_;
    notice->time_ns += connection_.clock_offset_ns;
    if (connection_.fd) append_frame(outgoing_, FrameType::kNotice, encode(*notice));
  }
}

void RankSupervisor::relay_rendezvous() {
  if (!rendezvous_) return;
  for (const RendezvousSocket::Received& received : rendezvous_->pop_received()) {
    if (!connection_.fd) continue;
    append_frame(outgoing_, FrameType::kRendezvous,
                 RendezvousBytes{
                     .session = received.session, .last = received.last, .bytes = received.bytes});
  }
}

void RankSupervisor::detect_end() {
  if (ended_ || program_ < 0) return;
  const auto status = peek_exit(program_);
  if (!status) return;
  relay_notices();
  if (rendezvous_) rendezvous_->read_all();
  relay_rendezvous();
  ended_ = Ended{.time_ns = realtime_ns() + connection_.clock_offset_ns,
                 .pid = program_,
                 .code = status->code,
                 .signal = status->signal,
                 .dumped_core = status->dumped_core,
                 .stopped = stopped_};
  kill_at_.reset();
  stop_at_.reset();
  drain_until_ = Clock::now() + kDrainTime;
}

bool RankSupervisor::may_read() const { return credit_ > 0 && outgoing_.size() < kMaxOutgoing; }

/// Reports the end after the output, so that hvdrun has the last lines when it receives the report.
/// The report must not wait for a slow reader of hvdrun's output.
void RankSupervisor::report_if_ended() {
  if (reported_ || !ended_) return;
  if ((stdout_ || stderr_) && Clock::now() < *drain_until_ && may_read()) return;
  reported_ = true;
  if (!connection_.fd) return;
  append_frame(outgoing_, FrameType::kEnded, encode(*ended_));
  flush();
}

void RankSupervisor::finish_output() {
  if (drained_ || !reported_) return;
  if (stdout_ || stderr_) {
    // A pipe that was not read because the queue was full may still hold output, so read it first.
    if (Clock::now() < *drain_until_ || !may_read()) return;
    if (program_ > 0) ::kill(-program_, SIGKILL);
    const bool read_stdout = relay(stdout_, FrameType::kStdout);
    const bool read_stderr = relay(stderr_, FrameType::kStderr);
    if (read_stdout || read_stderr || !may_read()) return;
  }
  drained_ = true;
  if (!connection_.fd) return;
  append_frame(outgoing_, FrameType::kDrained, "{}");
  flush();
}

void RankSupervisor::stop_later(const SignalOrder& order) {
  const TimePoint at = Clock::now() + milliseconds(order.after_ms);
  if (stop_at_ && *stop_at_ <= at) return;
  stop_at_ = at;
  later_ = order;
}

void RankSupervisor::stop(int signal, int kill_after_ms) {
  relay_notices();  // notices and an end before the stop are the program's own
  detect_end();
  stopped_ = true;
  stop_at_.reset();
  if (program_ < 0 && !ended_) {
    ended_ = Ended{.time_ns = realtime_ns() + connection_.clock_offset_ns,
                   .code = 128 + signal,
                   .signal = signal,
                   .stopped = true};
    drain_until_ = Clock::now();
    return;
  }
  signal_program(signal);
  if (kill_after_ms < 0) return;
  const TimePoint kill_at = Clock::now() + milliseconds(kill_after_ms);
  kill_at_ = kill_at_ ? std::min(*kill_at_, kill_at) : kill_at;
}

/// Passes a signal on to the program. SIGUSR1, which requests a state dump, goes only to processes
/// that have a handler for it now, because it would end the others.
void RankSupervisor::pass_on(int signal) const {
  if (signal != SIGUSR1) return signal_program(signal);
  if (program_ <= 0 || ended_) return;
  for (const pid_t member : group_members(program_)) {
    if (handles(member, signal)) ::kill(member, signal);
  }
}

void RankSupervisor::signal_program(int signal) const {
  if (program_ > 0 && !ended_) ::kill(-program_, signal);
}

bool RankSupervisor::done() const {
  if (!ended_ || !drained_) return false;
  return !connection_.fd || (released_ && outgoing_.empty());
}

}  // namespace hvd::launcher
