#include "elastic/member_link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <variant>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::elastic {
namespace {

using member::Member;

/// Time for a process that has lost hvdrun to end by itself.
constexpr auto kTimeToEnd = std::chrono::seconds(5);
constexpr std::size_t kLengthBytes = 4;

int made_eventfd() {
  const int made = ::eventfd(0, EFD_CLOEXEC);
  if (made < 0) throw Error(text("hvd::elastic: eventfd: ", std::strerror(errno)));
  return made;
}

}  // namespace

MemberLink::MemberLink(int socket, member::WorkerId own, std::string program)
    : socket_(socket), wake_(made_eventfd()), member_(own, std::move(program)) {
  ::fcntl(socket_, F_SETFD, FD_CLOEXEC);
  thread_ = start_thread("hvd-member", [this](const std::stop_token& stop) { run(stop); });
}

MemberLink::~MemberLink() {
  stop();
  ::close(socket_);
  ::close(wake_);
}

void MemberLink::stop() {
  thread_.request_stop();
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_, &one, sizeof one));
  if (thread_.joinable()) thread_.join();
}

void MemberLink::run(const std::stop_token& stop) {
  while (read_frame(stop)) interrupt_if_requested();
  if (stop.stop_requested()) return;
  {
    const MutexLock lock(mutex_);
    member_.disconnected();
    carry_out();
    if (!exit_) return;  // the job had ended
  }
  interrupt_if_requested();
  const auto until = std::chrono::steady_clock::now() + kTimeToEnd;
  while (!stop.stop_requested() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  if (stop.stop_requested()) return;
  HVD_LOG(kError) << "the connection to hvdrun has ended, and the process with it";
  ::_exit(EXIT_FAILURE);
}

/// Returns false once the connection has ended or is no longer needed.
bool MemberLink::read_frame(const std::stop_token& stop) {
  unsigned char length[kLengthBytes];
  if (!read_all(reinterpret_cast<std::byte*>(length), sizeof length, stop)) return false;
  std::uint32_t bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    bytes |= static_cast<std::uint32_t>(length[i]) << (8 * i);
  if (bytes == 0 || bytes > kMaxFrameBytes) {
    HVD_LOG(kError) << "hvdrun sent a frame of " << bytes << " bytes";
    return false;
  }
  std::vector<std::byte> body(bytes);
  if (!read_all(body.data(), body.size(), stop)) return false;
  try {
    const member::ToWorker message = member::decode_to_worker(body);
    const MutexLock lock(mutex_);
    member_.receive(message);
    carry_out();
    return member_.phase() != Member::Phase::kOver;
  } catch (const std::exception& error) {
    HVD_LOG(kError) << "hvdrun sent an invalid message: " << error.what();
    return false;
  }
}

bool MemberLink::read_all(std::byte* into, std::size_t bytes, const std::stop_token& stop) {
  while (bytes > 0) {
    pollfd ready[] = {{.fd = socket_, .events = POLLIN, .revents = 0},
                      {.fd = wake_, .events = POLLIN, .revents = 0}};
    if (::poll(ready, 2, -1) < 0 && errno != EINTR) return false;
    if (stop.stop_requested()) return false;
    const ssize_t got = ::recv(socket_, into, bytes, MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0) {
      if (errno == EAGAIN || errno == EINTR) continue;
      return false;
    }
    into += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void MemberLink::send(const member::ToCoordinator& message) {
  const wire::Bytes body = member::encode(message);
  std::vector<std::byte> frame(kLengthBytes + body.size());
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    frame[i] = static_cast<std::byte>(body.size() >> (8 * i));
  std::memcpy(frame.data() + kLengthBytes, body.data(), body.size());
  for (std::size_t sent = 0; sent < frame.size();) {
    const ssize_t some = ::send(socket_, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) return;  // the thread detects the end of the connection
    sent += static_cast<std::size_t>(some);
  }
}

void MemberLink::carry_out() {
  for (const member::MemberAction& action : member_.take_actions()) carry_out(action);
  changed_.notify_all();
}

void MemberLink::carry_out(const member::MemberAction& action) {
  if (const auto* const out = std::get_if<member::Send>(&action)) return send(out->message);
  if (const auto* const leave = std::get_if<member::Leave>(&action)) {
    leave_ = leave->cause;
    interruption_ = leave->cause;
    form_.reset();
    run_.reset();
  }
  if (const auto* const form = std::get_if<member::Form>(&action)) form_ = *form;
  if (const auto* const run = std::get_if<member::Run>(&action)) run_ = run->generation;
  if (std::holds_alternative<member::Finish>(action)) finish_ = true;
  if (const auto* const exit = std::get_if<member::Exit>(&action)) {
    exit_ = exit->cause;
    interruption_ = exit->cause;
  }
}

/// Calls the function of set_interrupt() without holding mutex_.
void MemberLink::interrupt_if_requested() {
  std::optional<std::string> cause;
  {
    const MutexLock lock(mutex_);
    cause = std::exchange(interruption_, std::nullopt);
  }
  if (!cause) return;
  const MutexLock lock(interrupt_mutex_);
  if (interrupt_) interrupt_(*cause);
}

void MemberLink::join() {
  const MutexLock lock(mutex_);
  member_.join();
  carry_out();
}

Next MemberLink::next() {
  const MutexLock lock(mutex_);
  for (;;) {
    if (exit_) return {.kind = Next::Kind::kExit, .cause = *exit_};
    if (finish_) return {.kind = Next::Kind::kFinish};
    if (auto cause = std::exchange(leave_, std::nullopt))
      return {.kind = Next::Kind::kLeave, .cause = std::move(*cause)};
    if (auto form = std::exchange(form_, std::nullopt))
      return {.kind = Next::Kind::kForm, .form = std::move(*form)};
    if (const auto run = std::exchange(run_, std::nullopt))
      return {.kind = Next::Kind::kRun, .run = *run};
    changed_.wait(mutex_);
  }
}

void MemberLink::set_interrupt(Interrupt interrupt) {
  const MutexLock lock(interrupt_mutex_);
  interrupt_ = std::move(interrupt);
}

bool MemberLink::over() const {
  const MutexLock lock(mutex_);
  const Member::Phase phase = member_.phase();
  return phase == Member::Phase::kLeaving || phase == Member::Phase::kFailed || exit_ || finish_;
}

void MemberLink::left(member::StateSummary state, bool can_load, std::string address,
                      bool divided) {
  const MutexLock lock(mutex_);
  leave_.reset();  // a reset since then needs no further leaving
  if (member_.phase() != Member::Phase::kLeaving) return;  // the connection has ended
  member_.left(state, can_load, std::move(address), divided);
  carry_out();
}

void MemberLink::synced(member::Generation generation, member::StateSummary state) {
  const MutexLock lock(mutex_);
  member_.synced(generation, state);
  carry_out();
}

void MemberLink::failed(member::Generation generation, std::optional<member::WorkerId> accused,
                        std::string cause) {
  const MutexLock lock(mutex_);
  if (member_.generation() != generation) return;
  member_.failed(accused, std::move(cause));
  carry_out();
}

void MemberLink::report_exception(member::Commit commit, std::string cause) {
  const MutexLock lock(mutex_);
  member_.report_exception(commit, std::move(cause));
  carry_out();
}

void MemberLink::at_end() {
  const MutexLock lock(mutex_);
  if (member_.phase() == Member::Phase::kOver) return;
  member_.at_end();
  carry_out();
}

bool MemberLink::commit() {
  const MutexLock lock(mutex_);
  if (member_.phase() == Member::Phase::kOver) return false;
  Member::Verdict verdict = member_.begin_commit();
  carry_out();
  while (verdict == Member::Verdict::kWait) {
    changed_.wait(mutex_);
    if (member_.phase() == Member::Phase::kOver) return false;
    verdict = member_.may_commit();
    carry_out();
  }
  return verdict == Member::Verdict::kGoOn;
}

std::vector<int> MemberLink::leaving() const {
  const MutexLock lock(mutex_);
  return member_.leaving();
}

}  // namespace hvd::elastic
