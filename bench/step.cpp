#include "bench/commands.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "bench/step_report.h"
#include "hvd/hvd.h"

namespace hvd::bench {
namespace {

/// The largest resident memory of this process, less the memory that was resident at first. If n
/// processes share memory when bytes() is called, each counts 1/n of it.
class PeakMemory {
 public:
  PeakMemory();
  /// The peak since construction or the last forget(), in bytes; no value if the kernel does not
  /// allow a process to reset its peak.
  std::optional<std::size_t> bytes() const;
  /// Resets the peak. Keeps the amount that was resident at first.
  void forget();

 private:
  std::size_t before_ = 0;
  bool possible_ = false;
};

std::size_t bytes_in(const char* file, const std::string& key) {
  std::ifstream status(file);
  for (std::string word; status >> word;) {
    if (word != key) continue;
    std::size_t kibibytes = 0;
    status >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

std::size_t status_bytes(const std::string& key) { return bytes_in("/proc/self/status", key); }

/// The bytes of shared memory that are part of this process's resident size, but count for other
/// processes.
std::size_t counted_elsewhere() {
  const std::size_t resident = status_bytes("RssShmem:");
  return resident - std::min(resident, bytes_in("/proc/self/smaps_rollup", "Pss_Shmem:"));
}

PeakMemory::PeakMemory() {
  forget();
  before_ = status_bytes("VmRSS:") - counted_elsewhere();
}

void PeakMemory::forget() {
  // Returns freed memory to the kernel, so that it counts only when it is used again.
  malloc_trim(0);
  // proc(5): writing 5 resets the peak to the resident size.
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;
  possible_ = reset.good();
}

std::optional<std::size_t> PeakMemory::bytes() const {
  if (!possible_) return std::nullopt;
  const std::size_t peak = status_bytes("VmHWM:") - counted_elsewhere();
  return peak - std::min(peak, before_);
}

using Clock = std::chrono::steady_clock;

struct Entrant {
  std::unique_ptr<StepContender> contender;
  StepSamples samples;
};

/// Compares the contenders with one parameter set. Only one of them may be hvd's, because hvd's
/// steady state is measured as in a program with one optimizer.
class StepMatch {
 public:
  StepMatch(const Session& session, const StepOptions& options, const ParameterSet& set,
            const std::vector<std::string>& names)
      : session_(session),
        options_(options),
        set_(set),
        workload_(
            make_workload({set, options.compute, options.update, options.batch_size}, session)) {
    for (const std::string& name : names) enter(name);
  }

  Json play() {
    const bool correct = check();
    measure();
    std::vector<StepSamples> samples;
    for (Entrant& entrant : entrants_) {
      session_.slowest(entrant.samples.seconds);
      samples.push_back(std::move(entrant.samples));
    }
    Json row = {{"set", set_.name},
                {"compute", options_.compute},
                {"tensors", set_.shapes.size()},
                {"parameters", set_.elements()},
                {"correct", correct}};
    row.update(compare_steps(samples));
    return row;
  }

 private:
  /// Adds a contender, and measures its memory while it allocates its buffers.
  void enter(const std::string& name) {
    PeakMemory memory;
    Entrant entrant{workload_->contender(name), {name, {}}};
    run_untimed(*entrant.contender);
    entrant.samples.first_peak_bytes = largest(memory.bytes());
    memory.forget();
    run_untimed(*entrant.contender);
    entrant.samples.peak_bytes = largest(memory.bytes());
    entrant.contender->rest();
    entrants_.push_back(std::move(entrant));
  }

  void run_untimed(StepContender& contender) const {
    constexpr int kSteps = 3;
    for (int i = 0; i < kSteps && takes_part(contender); ++i) contender.run();
  }

  double largest(const std::optional<std::size_t>& bytes) const {
    return session_.slowest(bytes ? static_cast<double>(*bytes)
                                  : std::numeric_limits<double>::quiet_NaN());
  }

  bool takes_part(const StepContender& contender) const {
    return session_.rank() == 0 || !contender.on_one_rank();
  }

  bool check() {
    bool correct = true;
    for (const Entrant& entrant : entrants_) {
      const auto fault = entrant.contender->fault();
      if (fault)
        std::cerr << "hvd-bench: " + set_.name + ", " + entrant.contender->name() + ": " + *fault +
                         "\n";
      correct = session_.all(!fault.has_value()) && correct;
      entrant.contender->rest();
    }
    return correct;
  }

  /// Returns the time of one step, which follows the untimed ones.
  double time(StepContender& contender) const {
    session_.align();
    double seconds = 0;
    if (takes_part(contender)) {
      if (contender.on_one_rank()) let_others_sleep();
      for (int i = 0; i < options_.lead; ++i) contender.run();
      if (!contender.on_one_rank()) align_closely();
      const auto begin = Clock::now();
      contender.run();
      seconds = seconds_since(begin);
    }
    if (contender.on_one_rank()) session_.align_asleep();
    contender.rest();
    return seconds;
  }

  void let_others_sleep() const { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

  void align_closely() const {
    // If a rank slept, the ranks leave the first barrier as far apart as they reached it. The
    // second one brings them together.
    session_.align();
    session_.align();
  }

  void measure() {
    session_.align();
    const auto begin = Clock::now();
    for (const Entrant& entrant : entrants_) time(*entrant.contender);
    const double round = session_.slowest(seconds_since(begin));
    const int repetitions = repetitions_for(round, options_.repetitions);
    std::vector<std::size_t> order(entrants_.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(1);  // the same on every rank
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t index : order) {
        Entrant& entrant = entrants_[index];
        entrant.samples.seconds.push_back(time(*entrant.contender));
      }
    }
  }

  const Session& session_;
  const StepOptions& options_;
  const ParameterSet& set_;
  const std::unique_ptr<Workload> workload_;
  std::vector<Entrant> entrants_;
};

bool is_hvd(const std::string& name) { return name.starts_with("hvd"); }

/// One list of names per match, in the order in which they are reported.
std::vector<std::vector<std::string>> matches_of(const StepOptions& options, int ranks) {
  std::vector<std::string> others;
  std::vector<std::string> ours;
  for (const std::string& name : step_contender_names()) {
    if (std::find(options.contenders.begin(), options.contenders.end(), name) ==
        options.contenders.end())
      continue;
    if (name == "one" && ranks == 1) continue;  // then it is "alone"
    (is_hvd(name) ? ours : others).push_back(name);
  }
  // The added time is measured against this contender.
  if (std::find(others.begin(), others.end(), "alone") == others.end())
    others.insert(others.begin(), "alone");
  if (ours.empty()) return {others};
  std::vector<std::vector<std::string>> matches;
  for (const std::string& mine : ours) {
    matches.push_back(others);
    matches.back().insert(std::find(matches.back().begin(), matches.back().end(), "alone") + 1,
                          mine);
  }
  return matches;
}

}  // namespace

Json run_step(const Session& session, const StepOptions& options, std::ostream& out) {
  const Json gloo = options.gloo_path.empty() ? Json::object() : read_json(options.gloo_path);
  share_out_threads(options.threads);
  Json result = describe_torch();
  if (session.rank() == 0) print_description(result, out);
  result["lead"] = options.lead;
  result["correct"] = true;
  result["rows"] = Json::array();
  for (const std::string& name : options.sets) {
    const ParameterSet set = parameter_set(name);
    for (const auto& contenders : matches_of(options, session.size())) {
      Json row = StepMatch(session, options, set, contenders).play();
      add_gloo_steps(row, gloo);
      if (session.rank() == 0) print_step(row, out);
      result["correct"] = result["correct"].get<bool>() && row["correct"].get<bool>();
      result["rows"].push_back(std::move(row));
    }
  }
  return result;
}

}  // namespace hvd::bench
