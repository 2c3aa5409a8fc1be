#include "bench/commands.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "bench/statistics.h"
#include "engine/executor.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kElements = 1024;
// The number of times that a batch reads the timeline's switch: when it is agreed on, launched, and
// done (core/engine/executor.cpp). A replayed step never reads the log's level, as
// steady_count_test asserts.
constexpr int kTimelineChecks = 3;

/// The CPU time of all threads of this process so far, in seconds.
double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Runs the same operations in every step.
class Steps {
 public:
  Steps(const Session& session, int tensors, std::int64_t elements, const std::string& name)
      : session_(session),
        memory_(static_cast<std::size_t>(tensors) + 1,
                std::vector<float>(static_cast<std::size_t>(elements))) {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      Submission submission;
      submission.name = name + "." + std::to_string(i);
      // The maximum leaves equal values unchanged, however often it is repeated.
      submission.parameters = Allreduce{.op = ReduceOp::kMax};
      submission.input = {reinterpret_cast<std::byte*>(memory_[i].data()),
                          elements,
                          DataType::kFloat32,
                          {},
                          {elements}};
      submission.output = submission.input;
      submissions_.push_back(std::move(submission));
    }
    handles_.resize(memory_.size());
  }

  /// @param extra whether to add the operation that the other steps do not have
  void step(bool extra) {
    const std::size_t count = submissions_.size() - (extra ? 0 : 1);
    for (std::size_t i = 0; i < count; ++i)
      memory_[i].front() = static_cast<float>(session_.rank());
    submit_all(std::span<const Submission>(submissions_).first(count),
               std::span(handles_).first(count), Progress::kCaller);
    for (std::size_t i = 0; i < count; ++i) {
      handles_[i].wait();
      handles_[i].status().raise_if_error();
      if (memory_[i].front() != static_cast<float>(session_.size() - 1))
        throw Error("hvd-bench: a steady step gave a wrong maximum");
    }
  }

  /// Returns the seconds for all steps. @param extra_at the step with an additional operation; -1:
  /// no step
  double run(int steps, int extra_at) {
    session_.align();
    const auto begin = Clock::now();
    for (int i = 0; i < steps; ++i) step(i == extra_at);
    return seconds_since(begin);
  }

 private:
  const Session& session_;
  std::vector<std::vector<float>> memory_;
  std::vector<Submission> submissions_;
  std::vector<Operation> handles_;
};

Json measure_deviation(const Session& session, const SteadyOptions& options) {
  Steps steps(session, options.tensors, kElements, "steady");
  constexpr int kWarmUps = 30;
  std::vector<double> clean, deviating;
  double negotiated = 0;
  for (int i = 0; i < options.rounds; ++i) {
    steps.run(kWarmUps, -1);
    clean.push_back(steps.run(options.steps, -1));
    const std::uint64_t before = metrics().negotiated_operations;
    deviating.push_back(steps.run(options.steps, options.steps / 2));
    negotiated +=
        static_cast<double>(metrics().negotiated_operations - before) - 1;  // the operation itself
  }
  session.slowest(clean);
  session.slowest(deviating);
  const double clean_run = percentile(clean, 0.5);
  const double deviating_run = percentile(deviating, 0.5);
  Json result;
  result["steps"] = options.steps;
  result["tensors"] = options.tensors;
  result["step_us"] = json_number(clean_run / options.steps * 1e6);
  result["cost_us"] = json_number((deviating_run - clean_run) * 1e6);
  result["loss"] = json_number(deviating_run / clean_run - 1);
  result["negotiated_steps"] = negotiated / options.rounds / options.tensors;
  return result;
}

Json measure_idle(const Session& session, const SteadyOptions& options) {
  session.align_asleep();
  const double before = cpu_seconds();
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(options.pause_seconds));
  const double share = (cpu_seconds() - before) / seconds_since(begin);
  session.align_asleep();
  return {{"seconds", options.pause_seconds},
          {"cores_per_rank", json_number(session.slowest(share))}};
}

/// Returns the nanoseconds of one `check` and the branch on its result, in a loop. In the middle of
/// other work it would add less.
template <class Check>
double nanoseconds_of(const Check& check) {
  constexpr int kTimes = 2'000'000;
  std::vector<double> samples;
  int on = 0;
  for (int i = 0; i < 9; ++i) {
    const auto begin = Clock::now();
    for (int n = 0; n < kTimes; ++n) {
      asm volatile("" : : : "memory");  // makes each check read the switch again
      if (check()) ++on;
    }
    samples.push_back(seconds_since(begin) / kTimes * 1e9);
  }
  if (on != 0) throw Error("hvd-bench: the timeline or the log is on");
  return percentile(samples, 0.5);
}

/// Measures the cost of checking the switches of the timeline and the log, as a part of the
/// shortest operation: a replayed one of 8 bytes.
Json measure_disabled(const Session& session, const SteadyOptions& options) {
  Steps steps(session, 1, 2, "shortest");
  steps.run(30, -1);
  std::vector<double> runs;
  const std::uint64_t before = metrics().locked_operations;
  for (int i = 0; i < options.rounds; ++i)
    runs.push_back(steps.run(options.steps, -1) / options.steps * 1e9);
  const std::uint64_t replayed = metrics().locked_operations - before;
  session.slowest(runs);
  const runtime::CurrentTimeline slot;
  const double timeline = session.slowest(nanoseconds_of([&] { return slot.on(); }));
  const double log =
      session.slowest(nanoseconds_of([] { return LogLevel::kTrace >= log_level(); }));
  const double operation = percentile(runs, 0.5);
  return {{"operation_ns", json_number(operation)},
          {"replayed_operations", replayed},
          {"locked_operations", replayed},  // the former name
          {"timeline_checks", kTimelineChecks},
          {"timeline_check_ns", json_number(timeline)},
          {"log_checks", 0},
          {"log_check_ns", json_number(log)},
          {"share", json_number(kTimelineChecks * timeline / operation)}};
}

}  // namespace

Json run_steady(const Session& session, const SteadyOptions& options, std::ostream& out) {
  Json result;
  result["deviation"] = measure_deviation(session, options);
  result["disabled"] = measure_disabled(session, options);
  result["idle"] = measure_idle(session, options);
  if (session.rank() != 0) return result;
  const Json& deviation = result["deviation"];
  out << "\none operation more in one of " << options.steps << " steps of " << options.tensors
      << " allreduces of 4 KiB\n";
  Table table({"step us", "cost us", "loss %", "negotiated steps"});
  table.add({number_text(deviation["step_us"].get<double>()),
             number_text(deviation["cost_us"].get<double>()),
             number_text(deviation["loss"].get<double>() * 100),
             number_text(deviation["negotiated_steps"].get<double>())});
  table.print(out);
  const Json& disabled = result["disabled"];
  out << "\nlocked operations of 8 bytes, with " << kTimelineChecks
      << " looks at the timeline's switch, and none at the log's\n";
  Table checks({"operation ns", "look at timeline ns", "at log ns", "of the operation %"});
  checks.add({number_text(disabled["operation_ns"].get<double>()),
              number_text(disabled["timeline_check_ns"].get<double>()),
              number_text(disabled["log_check_ns"].get<double>()),
              number_text(disabled["share"].get<double>() * 100)});
  checks.print(out);
  out << "\nwhile the program does nothing for " << options.pause_seconds << " s, a rank uses "
      << number_text(result["idle"]["cores_per_rank"].get<double>() * 100) << " % of a core\n";
  return result;
}

}  // namespace hvd::bench
