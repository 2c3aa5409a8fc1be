// A worker of an elastic job without a data plane: it exchanges the messages of membership and
// counts commits instead of training. Its arguments determine the rest. The common state of all
// workers is the number of the last commit.
//
//   steps=N   ends after N commits (20)
//   until=F   but not before the file F exists
//   ms=N      a commit takes N milliseconds (10)
//   load      can load a state when no worker has one
//   program=X names its program (p)
//   FAULT:W[:C[:V]]  worker W (0: every one) has a fault once it has begun commit C (0: before it
//             joins): exit (with code V), segv, kill, stop, hang, garbage, throw, accuse (worker
//             V);
//             with C = end: after the end of the job
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <variant>
#include <vector>

#include "base/text.h"
#include "elastic/member_stream.h"
#include "member/member.h"

namespace hvd::launcher::test {
namespace {

using member::Commit;
using member::Member;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr Commit kAtTheEnd = ~Commit{0};

struct Fault {
  std::string kind;
  member::WorkerId worker = 0;
  Commit commit = 0;
  int value = 0;
};

struct Settings {
  Commit steps = 20;
  std::string until;
  milliseconds step{10};
  bool load = false;
  std::string program = "p";
  std::vector<Fault> faults;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] { return std::atoi(word.substr(word.find('=') + 1).c_str()); };
    if (word.starts_with("steps=")) {
      settings.steps = static_cast<Commit>(number());
    } else if (word.starts_with("until=")) {
      settings.until = word.substr(6);
    } else if (word.starts_with("ms=")) {
      settings.step = milliseconds(number());
    } else if (word.starts_with("program=")) {
      settings.program = word.substr(8);
    } else if (word == "load") {
      settings.load = true;
    } else {
      const auto parts = split_text(word, ':');
      Fault fault{.kind = std::string(parts.at(0))};
      fault.worker = parse_number<member::WorkerId>(parts.at(1)).value();
      if (parts.size() > 2)
        fault.commit = parts[2] == "end" ? kAtTheEnd : parse_number<Commit>(parts[2]).value();
      if (parts.size() > 3) fault.value = parse_number<int>(parts[3]).value();
      settings.faults.push_back(fault);
    }
  }
  return settings;
}

int descriptor_from_environment() {
  const char* const socket = std::getenv("HVD_MEMBER_SOCKET");
  if (socket == nullptr) {
    std::fprintf(stderr, "not elastic\n");
    std::exit(9);
  }
  const int fd = std::atoi(socket);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

class Worker {
 public:
  explicit Worker(Settings settings)
      : settings_(std::move(settings)),
        id_(static_cast<member::WorkerId>(std::atoll(std::getenv("HVD_WORKER_ID")))),
        fd_(descriptor_from_environment()),
        member_(id_, settings_.program) {}

  int run();

 private:
  void say(const std::string& line) const {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  void have_faults(Commit commit);
  void act();
  void act(const member::Send& send);
  void act(const member::Leave& leave);
  void act(const member::Form& form);
  void act(const member::Run& run);
  void act(const member::Wake&);
  void act(const member::Finish&) { finished_ = true; }
  void act(const member::Exit& exit);
  void leave();
  void begin_commit();
  void obey(Member::Verdict verdict);
  void step();
  bool may_end() const;
  void receive(int timeout_ms);

  const Settings settings_;
  const member::WorkerId id_;
  const int fd_;
  Member member_;
  MemberStream incoming_;
  member::StateSummary state_ = {};
  bool finished_ = false;
  bool waits_ = false;  ///< for the verdict on its commit
  std::optional<steady_clock::time_point> commit_at_;
};

void Worker::have_faults(Commit commit) {
  for (const Fault& fault : settings_.faults) {
    if ((fault.worker != 0 && fault.worker != id_) || fault.commit != commit) continue;
    say("fault " + fault.kind);
    if (fault.kind == "exit") std::_Exit(fault.value);
    if (fault.kind == "segv") ::signal(SIGSEGV, SIG_DFL), ::raise(SIGSEGV);
    if (fault.kind == "kill") ::raise(SIGKILL);
    if (fault.kind == "stop") ::raise(SIGSTOP);
    if (fault.kind == "hang") ::pause();
    if (fault.kind == "garbage") (void)!::write(fd_, "\5\0\0\0hello", 9);
    if (fault.kind == "throw") {
      member_.report_exception(commit - 1, "a test throws");
      act();
      std::_Exit(3);
    }
    if (fault.kind == "accuse")
      member_.failed(static_cast<member::WorkerId>(fault.value), "a test accuses it");
  }
}

int Worker::run() {
  say(text("worker ", id_, " pid ", ::getpid(), " host ", std::getenv("GROUP_RANK"), " slot ",
           std::getenv("LOCAL_RANK"), " restarts ", std::getenv("TORCHELASTIC_RESTART_COUNT")));
  have_faults(0);
  member_.join();
  act();
  while (!finished_) {
    int wait_ms = -1;
    if (commit_at_) {
      const auto left = *commit_at_ - steady_clock::now();
      wait_ms =
          std::max(0, static_cast<int>(std::chrono::duration_cast<milliseconds>(left).count()) + 1);
    }
    receive(wait_ms);
    if (commit_at_ && steady_clock::now() >= *commit_at_) begin_commit();
    act();
  }
  say(text("worker ", id_, " ends at commit ", state_.commit));
  have_faults(kAtTheEnd);
  return 0;
}

void Worker::receive(int timeout_ms) {
  pollfd readable{fd_, POLLIN, 0};
  if (::poll(&readable, 1, timeout_ms) <= 0) return;
  std::array<char, 65536> buffer{};
  const ssize_t count = ::read(fd_, buffer.data(), buffer.size());
  if (count <= 0) return member_.disconnected();
  incoming_.feed({buffer.data(), static_cast<std::size_t>(count)});
  while (const auto message = incoming_.next()) {
    member_.receive(member::decode_to_worker(*message));
    act();
  }
}

void Worker::act() {
  for (auto actions = member_.take_actions(); !actions.empty(); actions = member_.take_actions())
    for (const auto& action : actions)
      std::visit([this](const auto& which) { act(which); }, action);
}

void Worker::act(const member::Send& send) {
  const std::string bytes = frame_member_message(member::encode(send.message));
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return;
    sent += static_cast<std::size_t>(count);
  }
}

void Worker::act(const member::Leave& leave_it) {
  say("leaves: " + leave_it.cause);
  leave();
}

void Worker::leave() {
  commit_at_.reset();
  waits_ = false;
  member_.left(state_, settings_.load, text("address of ", id_));
}

void Worker::act(const member::Form& form) {
  state_ = form.assign.load
               ? member::StateSummary{.commit = 0, .kind = member::StateKind::kWhole, .hash = 0}
               : form.assign.state;
  say(text("rank ", form.rank, " of ", form.assign.seats.size(), " generation ",
           form.assign.generation, " commit ", state_.commit));
  member_.synced(form.assign.generation, state_);
}

void Worker::act(const member::Run& run) {
  say(text("runs generation ", run.generation));
  step();
}

bool Worker::may_end() const {
  return state_.commit >= settings_.steps &&
         (settings_.until.empty() || ::access(settings_.until.c_str(), F_OK) == 0);
}

void Worker::step() {
  if (may_end()) return member_.at_end();
  commit_at_ = steady_clock::now() + settings_.step;
}

void Worker::begin_commit() {
  commit_at_.reset();
  have_faults(state_.commit + 1);
  act();
  if (member_.phase() == Member::Phase::kRunning) obey(member_.begin_commit());
}

void Worker::act(const member::Wake&) {
  if (std::exchange(waits_, false)) obey(member_.may_commit());
}

void Worker::obey(Member::Verdict verdict) {
  waits_ = verdict == Member::Verdict::kWait;
  if (waits_) return;
  ++state_.commit;
  state_.kind = member::StateKind::kWhole;
  state_.hash = state_.commit;
  verdict == Member::Verdict::kStop ? leave() : step();
}

void Worker::act(const member::Exit& exit) {
  say("exits: " + exit.cause);
  std::_Exit(4);
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  return hvd::launcher::test::Worker(hvd::launcher::test::parse(argc, argv)).run();
}
