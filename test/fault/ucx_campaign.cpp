// The campaign of messages over UCX: three or four processes exchange messages. One of them is
// killed while it connects, transfers large messages or cancels them. The others have to cancel
// their messages in flight, and to receive each other's messages after that.
//
//   ucx_campaign [--rounds N] [--first SEED] [--moment 0|1|2] [--verbose] [--stacks]
//   --stacks: the stacks of a survivor that hangs, from gdb
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fault/ucx_campaign_frames.h"
#include "fault/ucx_campaign_rank.h"

namespace hvd::ucx_campaign {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kHardLimit = std::chrono::seconds(60);
/// How long a survivor may take to end after its last message.
constexpr auto kTimeToEnd = std::chrono::seconds(30);

struct Process {
  pid_t pid = 0;
  int socket = -1;
  bool done = false;  ///< it has reported that it is done, or has ended
};

struct Plan {
  std::uint64_t seed = 0;
  Moment moment = Moment::kConnecting;
  int size = 3;
  int victim = 0;
  std::chrono::microseconds to_stop{};  ///< after the start: to the order to take back, or the kill
  std::chrono::microseconds to_kill{};  ///< from there to the kill
};

Plan plan_of(std::uint64_t seed, int moment) {
  std::mt19937_64 random(seed);
  const auto between = [&random](double low, double high) {  // uniform in the logarithm
    const double part = static_cast<double>(random() >> 11) / 9007199254740992.0;
    return std::chrono::microseconds(static_cast<long>(low * std::pow(high / low, part)));
  };
  Plan plan{.seed = seed};
  plan.moment = static_cast<Moment>(moment >= 0 ? moment : static_cast<int>(seed % kMoments));
  plan.size = 3 + static_cast<int>(random() % 2);
  plan.victim = static_cast<int>(random() % static_cast<unsigned>(plan.size));
  switch (plan.moment) {
    case Moment::kConnecting:
      plan.to_stop = between(20, 20000);
      break;
    case Moment::kLargeMessages:
      plan.to_stop = between(5000, 80000);
      break;
    case Moment::kTakingBack:
      plan.to_stop = between(1000, 80000);
      plan.to_kill = between(1, 1000);
      break;
  }
  return plan;
}

void start(Process& process, const Orders& orders, std::vector<Process>& all) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw std::runtime_error("socketpair");
  process.pid = ::fork();
  if (process.pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const Process& other : all)
      if (other.socket >= 0) ::close(other.socket);
    ::close(ends[0]);
    Orders own = orders;
    own.socket = ends[1];
    const int ending = live(own);
    std::fflush(nullptr);
    ::_exit(ending);
  }
  ::close(ends[1]);
  process.socket = ends[0];
}

void say(const Process& process, unsigned char word) {
  static_cast<void>(::send(process.socket, &word, 1, MSG_NOSIGNAL));
}

/// Waits until every survivor has reported that it is done, or has ended.
void wait_until_done(std::vector<Process>& processes, Clock::time_point limit) {
  for (Process& process : processes) {
    if (process.done) continue;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
    pollfd waited{process.socket, POLLIN, 0};
    ::poll(&waited, 1, std::max(0, static_cast<int>(left)));
    process.done = true;
  }
}

void print_stacks(pid_t pid) {
  const std::string command =
      "timeout 30 gdb -p " + std::to_string(pid) + " -batch -ex 'thread apply all bt 40' 2>&1";
  std::fflush(stdout);
  static_cast<void>(std::system(command.c_str()));
}

std::string ending_of(const Process& process, Clock::time_point limit, bool stacks) {
  int status = 0;
  while (::waitpid(process.pid, &status, WNOHANG) == 0) {
    if (Clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    if (stacks) print_stacks(process.pid);
    ::kill(process.pid, SIGKILL);
    ::waitpid(process.pid, nullptr, 0);
    return "hung";
  }
  if (WIFSIGNALED(status)) return std::string("ended by ") + ::strsignal(WTERMSIG(status));
  const auto code = static_cast<std::size_t>(WEXITSTATUS(status));
  return code < std::size(kEndingNames) ? std::string(kEndingNames[code])
                                        : "exit code " + std::to_string(code);
}

/// How the survivors ended.
std::vector<std::string> play(const Plan& plan, bool stacks) {
  std::vector<Process> processes(static_cast<std::size_t>(plan.size));
  for (int rank = 0; rank < plan.size; ++rank) {
    start(processes[static_cast<std::size_t>(rank)],
          {.rank = rank, .size = plan.size, .moment = plan.moment, .seed = plan.seed}, processes);
  }
  std::vector<std::vector<std::byte>> addresses;
  addresses.reserve(processes.size());
  for (const Process& process : processes) addresses.push_back(read_frame(process.socket));
  for (const Process& process : processes)
    for (const auto& address : addresses) write_frame(process.socket, address);

  Process& victim = processes[static_cast<std::size_t>(plan.victim)];
  std::this_thread::sleep_for(plan.to_stop);
  if (plan.moment == Moment::kTakingBack) {
    for (const Process& process : processes) say(process, kStop);
    std::this_thread::sleep_for(plan.to_kill);
  }
  ::kill(victim.pid, SIGKILL);
  victim.done = true;
  for (const Process& process : processes) say(process, static_cast<unsigned char>(plan.victim));
  const auto limit = Clock::now() + kHardLimit;
  wait_until_done(processes, limit);
  if (stacks && Clock::now() >= limit)
    for (const Process& process : processes)
      if (&process != &victim) print_stacks(process.pid);
  std::vector<std::string> endings;
  for (const Process& process : processes) say(process, kEnd);
  for (const Process& process : processes) {
    const std::string ending = ending_of(process, limit + kTimeToEnd, stacks);
    if (&process != &victim) endings.push_back(ending);
    ::close(process.socket);
  }
  return endings;
}

struct Options {
  std::uint64_t first = 0;
  std::uint64_t rounds = 12;
  int moment = -1;
  bool verbose = false;
  bool stacks = false;
};

bool read_options(int count, char** arguments, Options& options) {
  for (int index = 1; index < count; ++index) {
    const std::string name = arguments[index];
    if (name == "--verbose") {
      options.verbose = true;
      continue;
    }
    if (name == "--stacks") {
      options.stacks = true;
      continue;
    }
    if (++index >= count) return false;
    const auto value = std::strtoull(arguments[index], nullptr, 10);
    if (name == "--rounds") {
      options.rounds = value;
    } else if (name == "--first") {
      options.first = value;
    } else if (name == "--moment" && value < kMoments) {
      options.moment = static_cast<int>(value);
    } else {
      return false;
    }
  }
  return true;
}

int run(const Options& options) {
  std::map<Moment, std::map<std::string, int>> counts;
  std::map<Moment, int> kills;
  bool bad = false;
  for (std::uint64_t seed = options.first; seed < options.first + options.rounds; ++seed) {
    const Plan plan = plan_of(seed, options.moment);
    ++kills[plan.moment];
    for (const std::string& ending : play(plan, options.stacks)) {
      ++counts[plan.moment][ending];
      const bool well = ending == kEndingNames[kWell];
      bad = bad || !well;
      if (well && !options.verbose) continue;
      std::printf(
          "seed %llu, %s, %d ranks: a survivor: %s\n", static_cast<unsigned long long>(seed),
          kMomentNames[static_cast<std::size_t>(plan.moment)].data(), plan.size, ending.c_str());
      std::fflush(stdout);
    }
  }
  for (const auto& [moment, endings] : counts) {
    std::printf("%s: %d kills; survivors:", kMomentNames[static_cast<std::size_t>(moment)].data(),
                kills[moment]);
    for (const auto& [ending, count] : endings) std::printf(" %d %s", count, ending.c_str());
    std::printf("\n");
  }
  return bad ? 1 : 0;
}

}  // namespace
}  // namespace hvd::ucx_campaign

int main(int count, char** arguments) {
  hvd::ucx_campaign::Options options;
  if (!hvd::ucx_campaign::read_options(count, arguments, options)) {
    std::fprintf(stderr,
                 "usage: ucx_campaign [--rounds N] [--first SEED] [--moment 0|1|2] [--verbose] "
                 "[--stacks]\n");
    return 2;
  }
  try {
    return hvd::ucx_campaign::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ucx_campaign: %s\n", error.what());
    return 1;
  }
}
