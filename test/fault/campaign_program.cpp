// campaign_program SEED: one rank of a run of the fault campaign. It runs a training-like loop in
// two epochs, each with its own init() and shutdown(). One rank fails as the seed determines. The
// program prints one line per event to standard output, which campaign_judge.cpp reads:
//
// @hvd EVENT RANK ...
//   PID pid | FAULT time | FINAL | WRONG text | SHUTDOWN seconds | END how
//   OP class key members seconds message       an operation failed and the job goes on
//   LOST class time where lost_rank message    the runtime has failed
//   LEFT time message                          a rank has left
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "fault/campaign_operations.h"
#include "fault/campaign_plan.h"
#include "support/mpi_variables.h"

namespace hvd::campaign {
namespace {

// The time of a clock that all processes of the machine share.
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int rank_by_launcher() {
  return testing::first_variable({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"}).value_or(0);
}

/// Prints a line with one write(), because the process may be killed right afterwards, and several
/// threads print.
template <class... Parts>
void say(const char* event, const Parts&... parts) {
  std::ostringstream line;
  line.precision(6);
  line << std::fixed << "@hvd " << event << ' ' << rank_by_launcher();
  ((line << ' ' << parts), ...);
  std::string text = line.str();
  for (char& c : text) c = c == '\n' ? ' ' : c;
  text += '\n';
  if (::write(STDOUT_FILENO, text.data(), text.size()) < 0) std::abort();
}

std::string context_of(int epoch, int step) {
  return "e" + std::to_string(epoch) + ".s" + std::to_string(step) + '.';
}

const char* class_of(const Error& error) {
  if (dynamic_cast<const PeerLostError*>(&error) != nullptr) return "PeerLostError";
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "MismatchError";
  if (dynamic_cast<const StalledError*>(&error) != nullptr) return "StalledError";
  if (dynamic_cast<const ShutdownError*>(&error) != nullptr) return "ShutdownError";
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "UsageError";
  return "Error";
}

/// Thrown on the victim, which then leaves the job by shutdown().
struct HasLeft {};

/// Causes the fault on the victim, once.
class Saboteur {
 public:
  explicit Saboteur(const Plan& plan) : plan_(plan), here_(rank_by_launcher() == plan.victim) {}
  Saboteur(const Saboteur&) = delete;
  Saboteur& operator=(const Saboteur&) = delete;

  bool due(Moment moment, int epoch, int step = -1) const {
    return here_ && !fired_ && moment == plan_.moment && epoch == plan_.epoch &&
           (step < 0 || step == plan_.step);
  }
  void at(Moment moment, int epoch, int step = -1) {
    if (!due(moment, epoch, step)) return;
    plan_.by_timer() ? strike_later() : strike();
  }
  void strike() {
    if (fired_.exchange(true)) return;
    say("FAULT", now());
    switch (plan_.fault) {
      case Fault::kKill:
        ::kill(::getpid(), SIGKILL);
        break;
      case Fault::kThrow:
        throw std::logic_error("the data set is broken");
      case Fault::kStop:
        ::kill(::getpid(), SIGSTOP);
        break;
      case Fault::kPause:
        pause();
        break;
      case Fault::kShortDelay:
      case Fault::kLongDelay:
        std::this_thread::sleep_for(std::chrono::duration<double>(plan_.delay));
        break;
      case Fault::kExit:
        std::exit(0);
      case Fault::kLeave:
        throw HasLeft{};
      default:
        break;
    }
  }
  void noted() {
    if (!fired_.exchange(true)) say("FAULT", now());
  }

 private:
  void strike_later() {
    timer_ = std::jthread([this](const std::stop_token& stop) {
      std::mutex mutex;
      std::unique_lock lock(mutex);
      std::condition_variable_any never;
      never.wait_for(lock, stop, std::chrono::duration<double>(plan_.delay), [] { return false; });
      if (!stop.stop_requested()) strike();
    });
  }
  static void pause() {
    std::string command = "sleep 1; kill -CONT " + std::to_string(::getpid());
    char shell[] = "/bin/sh";
    char option[] = "-c";
    char* const arguments[] = {shell, option, command.data(), nullptr};
    pid_t helper = 0;
    if (::posix_spawn(&helper, shell, nullptr, nullptr, arguments, environ) == 0)
      ::kill(::getpid(), SIGSTOP);
  }

  const Plan& plan_;
  const bool here_;
  std::atomic<bool> fired_{false};
  std::jthread timer_;
};

class Rank {
 public:
  explicit Rank(const Plan& plan) : plan_(plan), rank_(rank_by_launcher()), saboteur_(plan) {}
  void run();

 private:
  struct Running {
    Spec spec;
    std::shared_ptr<Memory> memory;
    Operation operation;
    double begin;
  };

  void run_epoch(int epoch);
  void make_sets(int epoch);
  void run_step(int epoch, int step, const std::vector<Spec>&);
  void submit_some(const std::vector<Spec>& members, bool with_callback);
  void finish_step();
  void abandon_step();
  void join_unevenly(int epoch);
  void leave();
  void after_departure();
  static void expect_same_error_again(const Error&);
  void end_runtime();
  void attempt(const std::string& key, const std::function<void()>&);
  void report_failed(const std::string& key, const std::vector<int>& members, const Error&,
                     double begin) const;
  const ProcessSet& set_of(const Spec&) const;
  std::vector<int> everyone() const;
  /// In every second job the members of the subset make and remove it alone.
  bool subset_by_members() const { return plan_.seed % 2 == 1; }
  bool makes_subset() const {
    return !subset_by_members() || std::ranges::binary_search(plan_.subset, rank_);
  }

  const Plan& plan_;
  const int rank_;
  Saboteur saboteur_;
  ProcessSet subset_;
  ProcessSet survivors_;
  std::vector<Running> running_;
  std::string context_;
  bool in_init_ = false;
};

std::vector<int> Rank::everyone() const {
  std::vector<int> all;
  for (int rank = 0; rank < plan_.ranks; ++rank) all.push_back(rank);
  return all;
}

const ProcessSet& Rank::set_of(const Spec& spec) const {
  static const ProcessSet world;
  return spec.set == Set::kSubset ? subset_ : spec.set == Set::kSurvivors ? survivors_ : world;
}

void Rank::report_failed(const std::string& key, const std::vector<int>& members,
                         const Error& error, double begin) const {
  std::string list;
  for (const int member : members) list += (list.empty() ? "" : ",") + std::to_string(member);
  say("OP", class_of(error), context_ + key, list, now() - begin, error.what());
}

/// Makes a call that all ranks make. A disagreement or a stall fails only this call.
void Rank::attempt(const std::string& key, const std::function<void()>& call) {
  const double begin = now();
  try {
    call();
  } catch (const MismatchError& error) {
    report_failed(key, everyone(), error, begin);
  } catch (const StalledError& error) {
    report_failed(key, everyone(), error, begin);
  }
}

void Rank::make_sets(int epoch) {
  if (plan_.fault == Fault::kDisagree && plan_.difference == Difference::kMembersOfSet &&
      epoch == plan_.epoch) {
    const bool differs = rank_ == plan_.victim;
    if (differs) saboteur_.noted();
    attempt("set", [&] {
      static_cast<void>(add_process_set(differs ? std::vector<int>{plan_.victim} : everyone()));
    });
  }
  if (makes_subset()) subset_ = add_process_set(plan_.subset, {.by_members = subset_by_members()});
  survivors_ = add_process_set(plan_.survivors);
}

void Rank::submit_some(const std::vector<Spec>& specs, bool with_callback) {
  std::vector<Submission> submissions;
  const std::size_t first = running_.size();
  const bool sabotages = rank_ == plan_.victim && context_ == context_of(plan_.epoch, plan_.step);
  for (Spec spec : specs) {
    if (sabotages && concerned(spec, plan_)) {
      saboteur_.noted();
      spec = sabotaged(spec, plan_);
    }
    auto memory = std::make_shared<Memory>();
    submissions.push_back(make_submission(spec, rank_, set_of(spec).id(), memory));
    if (with_callback) {
      Submission& submission = submissions.back();
      submission.on_done = [this](const Status&, const EventPtr&) { saboteur_.strike(); };
      if (auto allocate = submission.allocate_output) {
        submission.allocate_output = [this, allocate](const OutputSizes& sizes) {
          saboteur_.strike();
          return allocate(sizes);
        };
      }
    }
    running_.push_back({std::move(spec), std::move(memory), {}, now()});
  }
  std::vector<Operation> operations = submit_all(std::move(submissions));
  for (std::size_t i = 0; i < operations.size(); ++i) running_[first + i].operation = operations[i];
}

void Rank::run_step(int epoch, int step, const std::vector<Spec>& specs) {
  context_ = context_of(epoch, step);
  saboteur_.at(Moment::kBeforeStep, epoch, step);
  const auto own = std::count_if(specs.begin(), specs.end(),
                                 [this](const Spec& spec) { return spec.has_member(rank_); });
  const int chosen = std::min(plan_.position, static_cast<int>(own) - 1);
  int position = 0;
  for (const std::size_t index : order_on(rank_, specs, plan_, epoch, step)) {
    const Spec& spec = specs[index];
    if (!spec.has_member(rank_)) continue;
    if (position == chosen) saboteur_.at(Moment::kAmongSubmits, epoch, step);
    const bool with_callback =
        position++ == chosen && saboteur_.due(Moment::kInCallback, epoch, step);
    if (!spec.unnamed() || spec.form.group_size == 0) {
      submit_some({spec}, with_callback);
    } else if (spec.form.group_index == 0) {
      const auto begin = specs.begin() + static_cast<std::ptrdiff_t>(index);
      submit_some({begin, begin + spec.form.group_size}, with_callback);
    }
    if (spec.key == "large") saboteur_.at(Moment::kInTransfer, epoch, step);
  }
  saboteur_.at(Moment::kBeforeWait, epoch, step);
  finish_step();
}

/// Waits for all submissions, and compares the results with the expected ones.
void Rank::finish_step() {
  std::optional<Status> fatal;
  for (const Running& running : running_) {
    running.operation.wait();
    const Status& status = running.operation.status();
    if (status.ok()) {
      const std::string fault = check(running.spec, rank_, *running.memory);
      if (!fault.empty()) say("WRONG", context_, fault);
      continue;
    }
    try {
      status.raise_if_error();
    } catch (const Error& error) {
      const bool goes_on =
          status.code == StatusCode::kMismatch || status.code == StatusCode::kStalled;
      if (goes_on) report_failed(running.spec.key, running.spec.members, error, running.begin);
      if (!goes_on && !fatal) fatal = status;
    }
  }
  running_.clear();
  if (fatal) fatal->raise_if_error();
}

/// Waits for the operations that are still outstanding after a submission has thrown.
void Rank::abandon_step() {
  for (const Running& running : running_) {
    if (running.operation.valid()) running.operation.wait();
  }
  running_.clear();
}

void Rank::join_unevenly(int epoch) {
  const int own = plan_.extra[static_cast<std::size_t>(rank_)];
  for (int extra = 1; extra <= own; ++extra) {
    const int step = kSteps + extra;
    run_step(epoch, step, operations_of_extra_step(plan_, epoch, step, extra));
  }
  context_ = "e" + std::to_string(epoch) + '.';
  saboteur_.at(Moment::kInJoin, epoch);
  attempt("join", [&] {
    const int last = join();
    const int most = *std::max_element(plan_.extra.begin(), plan_.extra.end());
    if (plan_.extra[static_cast<std::size_t>(last)] != most && most > 0)
      say("WRONG", "join() says that rank", last, "was the last");
  });
}

void Rank::run_epoch(int epoch) {
  saboteur_.at(Moment::kInInit, epoch);
  in_init_ = true;
  init();
  in_init_ = false;
  context_ = "e" + std::to_string(epoch) + '.';
  if (rank() != rank_ || size() != plan_.ranks) say("WRONG", "rank", rank(), "of", size());
  saboteur_.at(Moment::kAnyTime, epoch);
  make_sets(epoch);
  for (int step = 0; step < kSteps; ++step)
    run_step(epoch, step, operations_of_step(plan_, epoch, step));
  if (plan_.joins) join_unevenly(epoch);
  context_ = "e" + std::to_string(epoch) + '.';
  if (epoch + 1 == kEpochs) say("FINAL");
  saboteur_.at(Moment::kInBarrier, epoch);
  attempt("barrier", [] { barrier(); });
  if (makes_subset()) attempt("remove", [this] { remove_process_set(subset_); });
  end_runtime();
}

void Rank::end_runtime() {
  const double begin = now();
  shutdown();
  say("SHUTDOWN", now() - begin);
  if (is_initialized()) say("WRONG", "initialized after shutdown()");
}

/// Runs operations on the other ranks after one has left.
void Rank::after_departure() {
  context_ = "after.";
  submit_some({operation_without_victim(plan_)}, false);
  finish_step();
  barrier(survivors_);
}

/// Called on the victim, which has submitted part of a step.
void Rank::leave() {
  end_runtime();
  for (const Running& running : running_) {
    if (!running.operation.done()) {
      say("WRONG", running.spec.key, "is outstanding after shutdown()");
      continue;
    }
    const Status& status = running.operation.status();
    if (!status.ok() && status.code != StatusCode::kShutdown)
      say("WRONG", running.spec.key, status.message);
    const std::string fault = status.ok() ? check(running.spec, rank_, *running.memory) : "";
    if (!fault.empty()) say("WRONG", fault);
  }
}

void Rank::expect_same_error_again(const Error& first) {
  try {
    barrier();
    say("WRONG", "a barrier after the loss ended well");
  } catch (const Error& later) {
    if (std::string(later.what()) != first.what())
      say("WRONG", "another error after the loss:", later.what());
  }
}

void Rank::run() {
  say("PID", ::getpid());
  const char* how = "done";
  try {
    for (int epoch = 0; epoch < kEpochs; ++epoch) run_epoch(epoch);
  } catch (const HasLeft&) {
    how = "left";
    leave();
  } catch (const ShutdownError& error) {
    how = "left";
    say("LEFT", now(), error.what());
    abandon_step();
    after_departure();
    end_runtime();
  } catch (const Error& error) {
    how = "lost";
    const auto* const lost = dynamic_cast<const PeerLostError*>(&error);
    say("LOST", class_of(error), now(), in_init_ ? "init" : "run",
        lost != nullptr ? lost->rank() : -1, error.what());
    abandon_step();
    if (is_initialized()) expect_same_error_again(error);
    end_runtime();
  }
  say("END", how);
}

}  // namespace
}  // namespace hvd::campaign

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const hvd::campaign::Plan plan = hvd::campaign::make_plan(std::strtoull(argv[1], nullptr, 10));
  hvd::campaign::Rank(plan).run();
  return 0;
}
