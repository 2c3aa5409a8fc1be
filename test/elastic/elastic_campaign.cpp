// Kills and stops workers of elastic jobs at random moments, with a real coordinator of membership
// in this process and no hvdrun. The seed is printed. Workers of --points kill themselves, each
// time at another point of their life.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/text.h"
#include "elastic/abandoned_memory.h"
#include "elastic/board.h"
#include "elastic/kill_point.h"
#include "member/coordinator.h"
#include "member/messages.h"

namespace hvd::testing {
namespace {

using member::Coordinator;
using member::WorkerId;
using std::chrono::milliseconds;

struct Plan {
  int ranks = 4;
  int kills = 30;
  int stops = 0;  ///< of the kills, those by SIGSTOP
  int seed = 1;
  int min_gap = 50;  ///< milliseconds
  int max_gap = 400;
  long elements = 1000;
  long computing = 1000;  ///< microseconds of a step
  bool protect = false;   ///< the first worker is not killed, and its memory is checked
  double peer_timeout = 30;
  int points = 0;  ///< rounds of kills at all named points, instead of random ones
  int hosts = 1;   ///< the workers have this many host names, so that messages go over UCX
  const char* program = HVD_ELASTIC_PROGRAM;
};

struct Child {
  pid_t pid = 0;
  int socket = -1;
  int ended = -1;  ///< a pidfd
  bool killed = false;
  std::vector<std::byte> received = {};
};

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

/// Gives this process a host name of its own, so that it shares no memory with other hosts.
bool pretend_host(const std::string& name) {
  return ::unshare(CLONE_NEWUTS) == 0 && ::sethostname(name.data(), name.size()) == 0;
}

/// A job, whose coordinator and agent this process is.
class Job {
 public:
  explicit Job(const Plan& plan);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();
  void run();

 private:
  std::string host_of(WorkerId id) const {
    return text("host", id % static_cast<WorkerId>(plan_.hosts));
  }
  void start_worker();
  void turn();
  void receive(WorkerId, Child&);
  void handle_frames(WorkerId, Child&);
  void carry_out();
  void deliver(const member::Deliver&);
  void collect(WorkerId);
  void replace_lost();
  void disturb();
  void disturb_at_points();
  bool is_whole() const;
  void arm();
  void note_victim();
  void check_progress();
  void sample_usage();
  void report() const;
  TimePoint now() const { return clock_.now(); }

  const Plan plan_;
  SteadyClock clock_;
  std::mt19937 random_;
  Coordinator coordinator_;
  int board_file_ = -1;
  Board* board_ = nullptr;
  std::map<WorkerId, Child> children_;
  std::set<pid_t> processes_;  ///< of all workers so far
  WorkerId last_id_ = 0;
  int disturbances_ = 0;
  TimePoint next_ = {};
  bool bad_exit_ = false;
  struct Kill {
    std::int64_t at = 0;
    member::Generation generation = 0;
    bool stop = false;
  };
  std::vector<Kill> done_;
  std::vector<KillPoint> points_ = {};  ///< to come, the next one last
  bool armed_ = false;                  ///< the board names the last of them
  TimePoint armed_at_ = {};
  bool second_end_ = false;
  Duration idle_ = {};  ///< since the last step, without the time in which this process was stopped
  TimePoint last_turn_ = {};
  std::int64_t last_step_ = 0;
  /// The last values of worker 1, which survives, before each disturbance.
  std::vector<std::int64_t> resident_ = {};
  std::vector<std::int64_t> allocated_ = {};
  std::vector<std::int64_t> descriptors_ = {};
};

/// The medians of the first and the last samples, without those of the first ten disturbances. A
/// worker's memory varies while it leaves one generation and prepares the next.
std::pair<std::int64_t, std::int64_t> first_and_last(std::vector<std::int64_t> samples) {
  if (samples.size() < 20) return {0, 0};
  samples.erase(samples.begin(), samples.begin() + 10);
  const auto part = static_cast<std::ptrdiff_t>(std::max<std::size_t>(samples.size() / 5, 5));
  const auto median = [part](auto first) {
    std::nth_element(first, first + part / 2, first + part);
    return *(first + part / 2);
  };
  const std::int64_t early = median(samples.begin());
  return {early, median(samples.end() - part)};
}

member::CoordinatorOptions options_of(const Plan& plan) {
  member::TimeSettings times;
  times.peer =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(plan.peer_timeout));
  times.join_window = milliseconds(20);
  return {.start_size = plan.ranks,
          .min_np = 1,
          .max_np = plan.ranks,
          .deadlines = member::Deadlines(times)};
}

Job::Job(const Plan& plan)
    : plan_(plan),
      random_(static_cast<unsigned>(plan.seed)),
      coordinator_(options_of(plan), clock_.now()) {
  board_file_ = ::memfd_create("board", 0);
  if (board_file_ < 0 || ::ftruncate(board_file_, sizeof(Board)) != 0) fail("no board");
  board_ = Board::map(board_file_);
  if (board_ == nullptr) fail("no board");
}

Job::~Job() {
  for (auto& [id, child] : children_) {
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
    ::close(child.socket);
    ::close(child.ended);
  }
  ::munmap(board_, sizeof(Board));
  ::close(board_file_);
}

void Job::start_worker() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("no socket pair");
  const WorkerId id = ++last_id_;
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail("no process");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    ::fcntl(ends[1], F_SETFD, 0);
    ::setenv("HVD_MEMBER_SOCKET", std::to_string(ends[1]).c_str(), 1);
    ::setenv("HVD_WORKER_ID", std::to_string(id).c_str(), 1);
    ::setenv("TORCHELASTIC_RUN_ID", "campaign", 1);
    ::setenv("HVD_PEER_TIMEOUT", std::to_string(plan_.peer_timeout).c_str(), 1);
    if (plan_.hosts > 1 && !pretend_host(host_of(id))) ::_exit(77);
    const std::string elements = std::to_string(plan_.elements);
    const std::string computing = std::to_string(plan_.computing);
    const std::string board = std::to_string(board_file_);
    ::execl(plan_.program, plan_.program, elements.c_str(), computing.c_str(), board.c_str(),
            nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  const int ended = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  children_[id] = {.pid = pid, .socket = ends[0], .ended = ended};
  processes_.insert(pid);
  coordinator_.worker_started(id, host_of(id), now());
}

void Job::receive(WorkerId id, Child& child) {
  std::array<std::byte, 65536> buffer;
  for (;;) {
    const ssize_t got = ::recv(child.socket, buffer.data(), buffer.size(), 0);
    if (got <= 0) break;
    child.received.insert(child.received.end(), buffer.begin(), buffer.begin() + got);
  }
  handle_frames(id, child);
}

void Job::handle_frames(WorkerId id, Child& child) {
  std::size_t begin = 0;
  while (child.received.size() - begin >= 4) {
    std::uint32_t bytes = 0;
    std::memcpy(&bytes, child.received.data() + begin, sizeof bytes);
    if (child.received.size() - begin - 4 < bytes) break;
    const auto body = std::span(child.received).subspan(begin + 4, bytes);
    coordinator_.receive(id, member::decode_to_coordinator(body), now());
    begin += 4 + bytes;
  }
  child.received.erase(child.received.begin(),
                       child.received.begin() + static_cast<std::ptrdiff_t>(begin));
}

void Job::deliver(const member::Deliver& deliver) {
  const auto found = children_.find(deliver.to);
  if (found == children_.end()) return;
  const wire::Bytes body = member::encode(deliver.message);
  std::vector<std::byte> frame(4 + body.size());
  const auto bytes = static_cast<std::uint32_t>(body.size());
  std::memcpy(frame.data(), &bytes, sizeof bytes);
  std::memcpy(frame.data() + 4, body.data(), body.size());
  // The frames of a job this small fit into the socket's buffer, also those to a stopped process.
  static_cast<void>(::send(found->second.socket, frame.data(), frame.size(), MSG_NOSIGNAL));
}

void Job::carry_out() {
  for (const auto& action : coordinator_.take_actions()) {
    if (const auto* const message = std::get_if<member::Deliver>(&action)) deliver(*message);
    if (const auto* const kill = std::get_if<member::Kill>(&action)) {
      const auto found = children_.find(kill->worker);
      if (found == children_.end()) continue;
      if (std::getenv("HVD_TEST_VERBOSE") != nullptr)
        std::printf("kill worker %llu: %s\n", static_cast<unsigned long long>(kill->worker),
                    kill->cause.c_str());
      found->second.killed = true;
      ::kill(found->second.pid, SIGKILL);
    }
  }
  for (const std::string& note : coordinator_.take_notes())
    if (std::getenv("HVD_TEST_VERBOSE") != nullptr) std::printf("note: %s\n", note.c_str());
}

void Job::collect(WorkerId id) {
  note_victim();
  const auto found = children_.find(id);
  int status = 0;
  if (::waitpid(found->second.pid, &status, 0) != found->second.pid) fail("waitpid");
  const bool in_order = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!in_order && !found->second.killed) {
    bad_exit_ = true;
    std::printf("worker %llu ended by itself: status %x\n", static_cast<unsigned long long>(id),
                static_cast<unsigned>(status));
  }
  ::close(found->second.socket);
  ::close(found->second.ended);
  children_.erase(found);
  coordinator_.worker_ended(id, "it has ended", now());
}

void Job::turn() {
  std::vector<pollfd> polled;
  std::vector<WorkerId> ids;
  for (const auto& [id, child] : children_) {
    polled.push_back({.fd = child.socket, .events = POLLIN, .revents = 0});
    polled.push_back({.fd = child.ended, .events = POLLIN, .revents = 0});
    ids.push_back(id);
  }
  ::poll(polled.data(), polled.size(), 2);
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (polled[2 * i].revents != 0) receive(ids[i], children_.at(ids[i]));
  carry_out();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if ((polled[2 * i + 1].revents & POLLIN) == 0) continue;
    receive(ids[i], children_.at(ids[i]));
    collect(ids[i]);
  }
  for (int host = 0; host < plan_.hosts; ++host)
    coordinator_.host_reported(host_of(static_cast<WorkerId>(host)), now());
  coordinator_.check(now());
  carry_out();
}

void Job::replace_lost() {
  if (coordinator_.outcome() || board_->finish.load() != 0) return;
  while (children_.size() < static_cast<std::size_t>(plan_.ranks)) start_worker();
}

void Job::disturb() {
  if (now() < next_ || board_->finish.load() != 0) return;
  const int gap = std::uniform_int_distribution(plan_.min_gap, plan_.max_gap)(random_);
  next_ = now() + milliseconds(gap);
  // A job without any completed step yet has no state to lose.
  if (board_->steps.load() == 0) return;
  std::vector<WorkerId> candidates;
  int whole = 0;
  for (const auto& [id, child] : children_) {
    const bool has_stepped =
        board_->usage[id % Board::kMaxWorkers].generation.load() != 0 && !child.killed;
    whole += has_stepped ? 1 : 0;
    if (!child.killed && !(plan_.protect && id == 1)) candidates.push_back(id);
  }
  if (candidates.empty()) return;
  std::shuffle(candidates.begin(), candidates.end(), random_);
  const WorkerId victim = candidates.front();
  const bool stepped = board_->usage[victim % Board::kMaxWorkers].generation.load() != 0;
  if (stepped && whole < 2) return;  // it may be the only one with the state
  Child& child = children_.at(victim);
  const bool stop = disturbances_ % 4 == 3 && disturbances_ / 4 < plan_.stops;
  done_.push_back({Board::now(), coordinator_.generation(), stop});
  child.killed = true;
  ::kill(child.pid, stop ? SIGSTOP : SIGKILL);
  if (++disturbances_ < plan_.kills) return;
  next_ = now() + milliseconds(500);
}

/// The points in a random order.
std::vector<KillPoint> round_of_points(std::mt19937& random) {
  using elastic::Stage;
  std::vector<KillPoint> points = {{Stage::kGiving, Role::kFirst},
                                   {Stage::kReceiving, Role::kJoiner}};
  for (const Stage stage :
       {Stage::kReady, Stage::kAssigned, Stage::kConnecting, Stage::kSynced, Stage::kCommitting})
    for (const Role role : {Role::kFirst, Role::kSurvivor, Role::kJoiner})
      points.push_back({stage, role});
  std::shuffle(points.begin(), points.end(), random);
  return points;
}

/// Whether all ranks have begun the present generation.
bool Job::is_whole() const {
  if (coordinator_.phase() != Coordinator::Phase::kRunning) return false;
  const auto generation = static_cast<std::int64_t>(coordinator_.generation());
  const bool stepped = board_->first_step[coordinator_.generation() % Board::kMaxGenerations] != 0;
  return stepped && children_.size() == static_cast<std::size_t>(plan_.ranks) &&
         std::all_of(children_.begin(), children_.end(), [&](const auto& entry) {
           return !entry.second.killed &&
                  board_->usage[entry.first % Board::kMaxWorkers].generation == generation;
         });
}

/// Names the next point, and kills another worker, so that the ranks form a generation.
void Job::arm() {
  const KillPoint point = points_.back();
  // In the middle of what takes a while: connecting, giving and receiving.
  const bool later = point.stage >= elastic::Stage::kConnecting &&
                     point.stage <= elastic::Stage::kReceiving && random_() % 4 != 0;
  board_->delay.store(later ? std::uniform_int_distribution(0, 8000)(random_) : 0);
  board_->point.store(point.number());
  armed_ = true;
  armed_at_ = now();
  const auto last =
      std::max_element(children_.begin(), children_.end(), [this](const auto& a, const auto& b) {
        return board_->rank[a.first % Board::kMaxWorkers] <
               board_->rank[b.first % Board::kMaxWorkers];
      });
  done_.push_back({Board::now(), coordinator_.generation(), false});
  ++disturbances_;
  last->second.killed = true;
  ::kill(last->second.pid, SIGKILL);
}

void Job::note_victim() {
  const std::int64_t victim = board_->victim.exchange(0);
  if (victim == 0) return;
  if (const auto found = children_.find(static_cast<WorkerId>(victim)); found != children_.end())
    found->second.killed = true;
  if (std::getenv("HVD_TEST_VERBOSE") != nullptr && !points_.empty())
    std::printf("worker %lld: %s\n", static_cast<long long>(victim), points_.back().name().c_str());
  ++disturbances_;
  if (armed_) points_.pop_back();
  armed_ = false;
  // One more of those that are at their end again.
  if (board_->finish.load() != 0 && !std::exchange(second_end_, true))
    board_->point.store(KillPoint{elastic::Stage::kAtEnd, Role::kSurvivor}.number());
}

/// Kills a worker at each point, and then two workers at the end of the job.
void Job::disturb_at_points() {
  note_victim();
  if (board_->finish.load() != 0) return;
  if (armed_ && now() - armed_at_ > std::chrono::seconds(20))
    fail("no worker has been " + points_.back().name());
  if (armed_ || !is_whole()) return;
  if (!points_.empty()) return arm();
  board_->delay.store(0);
  board_->point.store(KillPoint{elastic::Stage::kAtEnd, Role::kFirst}.number());
  board_->finish.store(1);
}

void Job::check_progress() {
  // Time in which this process was stopped does not count.
  idle_ += std::min<Duration>(now() - last_turn_, milliseconds(100));
  last_turn_ = now();
  if (std::exchange(last_step_, board_->last_step.load()) != last_step_) idle_ = {};
  const auto limit =
      std::chrono::duration<double>(plan_.peer_timeout >= 20 ? 30 : 20 + 4 * plan_.peer_timeout);
  if (idle_ < limit) return;
  for (const auto& [id, child] : children_)
    std::printf("worker %llu (pid %d)%s is alive\n", static_cast<unsigned long long>(id), child.pid,
                child.killed ? ", killed," : "");
  if (const char* const wait = std::getenv("HVD_TEST_HOLD")) ::sleep(std::atoi(wait));
  fail(text("no step for ", idle_, " in phase ", static_cast<int>(coordinator_.phase()),
            " of generation ", coordinator_.generation()));
}

void Job::sample_usage() {
  const Board::Usage& usage = board_->usage[1];
  const auto samples = static_cast<std::size_t>(disturbances_) + 1;
  resident_.resize(samples);
  allocated_.resize(samples);
  descriptors_.resize(samples);
  resident_.back() = usage.resident.load();
  allocated_.back() = usage.allocated.load();
  descriptors_.back() = usage.descriptors.load();
}

void Job::run() {
  for (int round = 0; round < plan_.points; ++round)
    for (const KillPoint point : round_of_points(random_)) points_.push_back(point);
  for (int i = 0; i < plan_.ranks; ++i) start_worker();
  last_turn_ = now();
  while (!coordinator_.outcome()) {
    turn();
    replace_lost();
    if (plan_.points > 0) {
      disturb_at_points();
    } else if (disturbances_ < plan_.kills) {
      disturb();
    } else if (now() >= next_) {
      board_->finish.store(1);
    }
    sample_usage();
    check_progress();
    if (bad_exit_) fail("a worker has ended by itself");
  }
  const TimePoint limit = now() + std::chrono::seconds(20);
  while (!children_.empty() && now() < limit) {
    carry_out();
    turn();
  }
  if (bad_exit_) fail("a worker has ended by itself");
  if (!children_.empty()) fail("a worker has not ended");
  if (*coordinator_.outcome() != member::Outcome::kComplete) fail("the job has not completed");
  if (board_->wrong.load() != 0 || board_->undone.load() != 0) fail("see above");
  for (const std::string& name : abandoned_memory(processes_)) fail("left in /dev/shm: " + name);
  report();
  if (!plan_.protect) return;
  // Messages between hosts take tens of MiB of the heap at some moments of a generation. The heap
  // has its final size soon, and its pages become resident little by little.
  const auto [memory_early, memory_late] = first_and_last(plan_.hosts > 1 ? allocated_ : resident_);
  const auto [descriptors_early, descriptors_late] = first_and_last(descriptors_);
  if (memory_late > memory_early + memory_early / 10) fail("memory grows");
  if (descriptors_late > descriptors_early + 8) fail("descriptors are lost");
}

void Job::report() const {
  std::vector<double> times;
  for (const Kill& kill : done_) {
    if (kill.stop) continue;
    for (auto g = kill.generation + 1; g < kill.generation + 4; ++g) {
      const std::int64_t first = board_->first_step[g % Board::kMaxGenerations].load();
      if (first < kill.at) continue;
      times.push_back(static_cast<double>(first - kill.at) / 1e6);
      break;
    }
  }
  std::sort(times.begin(), times.end());
  if (times.empty()) times.push_back(0);
  const auto [resident_early, resident_late] = first_and_last(resident_);
  const auto [allocated_early, allocated_late] = first_and_last(allocated_);
  const auto [descriptors_early, descriptors_late] = first_and_last(descriptors_);
  std::printf(
      "%d disturbances, %lld steps, %llu generations, %d resets; kill to next step: "
      "%zu times, median %.1f ms, p99 %.1f ms, longest %.1f ms; resident %lld -> %lld KiB, "
      "allocated %lld -> %lld KiB, descriptors %lld -> %lld\n",
      disturbances_, static_cast<long long>(board_->steps.load()),
      static_cast<unsigned long long>(coordinator_.generation()), coordinator_.resets(),
      times.size(), times[times.size() / 2], times[times.size() * 99 / 100], times.back(),
      static_cast<long long>(resident_early >> 10), static_cast<long long>(resident_late >> 10),
      static_cast<long long>(allocated_early >> 10), static_cast<long long>(allocated_late >> 10),
      static_cast<long long>(descriptors_early), static_cast<long long>(descriptors_late));
}

Plan plan_from(int argc, char** argv) {
  Plan plan;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::atol(argv[++i]) : 0; };
    if (word == "--ranks") {
      plan.ranks = static_cast<int>(number());
    } else if (word == "--kills") {
      plan.kills = static_cast<int>(number());
    } else if (word == "--stops") {
      plan.stops = static_cast<int>(number());
    } else if (word == "--seed") {
      plan.seed = static_cast<int>(number());
    } else if (word == "--gap") {
      plan.min_gap = static_cast<int>(number());
      plan.max_gap = static_cast<int>(number());
    } else if (word == "--elements") {
      plan.elements = number();
    } else if (word == "--computing") {
      plan.computing = number();
    } else if (word == "--peer-timeout") {
      plan.peer_timeout = static_cast<double>(number()) / 1000;
    } else if (word == "--points") {
      plan.points = static_cast<int>(number());
    } else if (word == "--hosts") {
      plan.hosts = static_cast<int>(number());
    } else if (word == "--c") {
      plan.program = HVD_ELASTIC_C_PROGRAM;
    } else if (word == "--protect") {
      plan.protect = true;
    } else {
      fail("unknown option " + word);
    }
  }
  return plan;
}

}  // namespace
}  // namespace hvd::testing

int main(int argc, char** argv) {
  using namespace hvd::testing;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const Plan plan = plan_from(argc, argv);
    std::printf("seed %d\n", plan.seed);
    if (plan.hosts > 1 && ::geteuid() != 0) {
      std::puts("skipped: only root may give processes a host name");
      return 77;
    }
    Job(plan).run();
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
