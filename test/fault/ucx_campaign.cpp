// The campaign of messages over UCX: three or four processes exchange messages. One of them is
// killed while it connects, transfers large messages or cancels them. The others have to cancel
// their messages in flight, and to receive each other's messages after that.
//
//   ucx_campaign [options of support/campaign.h] [--moment 0|1|2]
//   --moment: a Moment of ucx_campaign_rank.h; by default it depends on the seed
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "fault/ucx_campaign_rank.h"
#include "support/campaign.h"
#include "support/seeds.h"

namespace hvd::ucx_campaign {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using testing::CampaignOptions;

constexpr auto kHardLimit = std::chrono::seconds(60);
/// How long a survivor may take to end after its last message.
constexpr auto kTimeToEnd = std::chrono::seconds(30);

struct Plan {
  Moment moment = Moment::kConnecting;
  int size = 3;
  int victim = 0;
  microseconds until_stop{};  ///< from the start until the order to cancel messages, or the kill
  microseconds until_kill{};  ///< from that order until the kill
};

Plan make_plan(std::uint64_t seed, const CampaignOptions& options) {
  testing::Random random(seed, 0);
  const auto between = [&random](double low, double high) {  // uniform in the logarithm
    const double part = static_cast<double>(random.next() >> 11) / 9007199254740992.0;
    return microseconds(static_cast<long>(low * std::pow(high / low, part)));
  };
  Plan plan;
  plan.moment = static_cast<Moment>(options.own.empty() ? seed % kMomentNames.size()
                                                        : std::stoul(options.own[1]));
  plan.size = 3 + random.below(2);
  plan.victim = random.below(plan.size);
  switch (plan.moment) {
    case Moment::kConnecting:
      plan.until_stop = between(20, 20000);
      return plan;
    case Moment::kLargeMessages:
      plan.until_stop = between(5000, 80000);
      return plan;
    case Moment::kCancelling:
      plan.until_stop = between(1000, 80000);
      plan.until_kill = between(1, 1000);
      return plan;
  }
  throw std::out_of_range(text("--moment ", options.own[1], ", expected 0, 1 or 2"));
}

/// The ranks of one job. The destructor ends those that still run.
class Job {
 public:
  Job(const Plan& plan, std::uint64_t seed);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    for (const Process& process : processes_) {
      ::close(process.socket);
      if (process.pid == 0) continue;
      ::kill(process.pid, SIGKILL);
      ::waitpid(process.pid, nullptr, 0);
    }
  }

  void exchange_addresses();
  void send_all(unsigned char word);
  void kill_victim();
  /// Waits until every survivor has reported that it is done, or has ended.
  void wait_until_done(Clock::time_point limit);
  /// Adds a defect for each survivor that did not end well.
  void judge_ends(Clock::time_point limit, const CampaignOptions&, testing::JudgedJob&);

 private:
  struct Process {
    pid_t pid = 0;
    int socket = -1;
  };
  const Plan& plan_;
  std::vector<Process> processes_;
};

Job::Job(const Plan& plan, std::uint64_t seed) : plan_(plan) {
  for (int rank = 0; rank < plan.size; ++rank) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
      throw std::runtime_error("cannot make a pair of sockets");
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (const Process& other : processes_) ::close(other.socket);
      ::close(ends[0]);
      const int ending = run_rank({.rank = rank,
                                   .size = plan.size,
                                   .moment = plan.moment,
                                   .seed = seed,
                                   .socket = ends[1]});
      std::fflush(nullptr);
      ::_exit(ending);
    }
    ::close(ends[1]);
    processes_.push_back({pid, ends[0]});
  }
}

void Job::exchange_addresses() {
  std::vector<std::vector<std::byte>> addresses;
  for (const Process& process : processes_) addresses.push_back(receive_address(process.socket));
  for (const Process& process : processes_)
    for (const auto& address : addresses) send_address(process.socket, address);
}

void Job::send_all(unsigned char word) {
  for (const Process& process : processes_)
    static_cast<void>(::send(process.socket, &word, 1, MSG_NOSIGNAL));
}

void Job::kill_victim() {
  Process& victim = processes_[static_cast<std::size_t>(plan_.victim)];
  ::kill(victim.pid, SIGKILL);
  ::waitpid(std::exchange(victim.pid, 0), nullptr, 0);
}

void Job::wait_until_done(Clock::time_point limit) {
  for (const Process& process : processes_) {
    if (process.pid == 0) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now()).count();
    pollfd waited{process.socket, POLLIN, 0};
    ::poll(&waited, 1, std::max(0, static_cast<int>(left)));
  }
}

/// Describes how a rank ended; empty if it ended well.
std::string ending_of(int status) {
  if (WIFSIGNALED(status)) return text("ended by ", ::strsignal(WTERMSIG(status)));
  const auto code = static_cast<std::size_t>(WEXITSTATUS(status));
  if (code == kWell) return "";
  return code < kEndingNames.size() ? std::string(kEndingNames[code]) : text("exit code ", code);
}

void Job::judge_ends(Clock::time_point limit, const CampaignOptions& options,
                     testing::JudgedJob& job) {
  for (int rank = 0; rank < plan_.size; ++rank) {
    Process& process = processes_[static_cast<std::size_t>(rank)];
    if (process.pid == 0) continue;
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(process.pid, &status, WNOHANG)) == 0 && Clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string ending = ended == 0 ? "hung" : ending_of(status);
    if (ended == 0) {
      job.output += testing::end_late_process(process.pid, options);
      ::waitpid(process.pid, nullptr, 0);
    }
    process.pid = 0;
    if (!ending.empty()) job.defects.push_back(text("rank ", rank, ": ", ending));
  }
}

testing::JudgedJob run_job(std::uint64_t seed, const CampaignOptions& options) {
  const Plan plan = make_plan(seed, options);
  const std::string moment(kMomentNames[static_cast<std::size_t>(plan.moment)]);
  testing::JudgedJob judged{.plan = "seed " + std::to_string(seed) + ": rank " +
                                    std::to_string(plan.victim) + " of " +
                                    std::to_string(plan.size) + ", " + moment,
                            .row = moment};
  Job job(plan, seed);
  job.exchange_addresses();
  std::this_thread::sleep_for(plan.until_stop);
  if (plan.moment == Moment::kCancelling) {
    job.send_all(kStop);
    std::this_thread::sleep_for(plan.until_kill);
  }
  job.kill_victim();
  job.send_all(static_cast<unsigned char>(plan.victim));
  const auto limit = Clock::now() + kHardLimit;
  job.wait_until_done(limit);
  job.send_all(kEnd);
  job.judge_ends(limit + kTimeToEnd, options, judged);
  return judged;
}

}  // namespace
}  // namespace hvd::ucx_campaign

int main(int argc, char** argv) {
  return hvd::testing::run_campaign(
      argc, argv,
      {.seeds = 12, .own_option = "--moment 0|1|2", .run_job = hvd::ucx_campaign::run_job});
}
