#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/parameter_sets.h"
#include "bench/session.h"

namespace hvd::bench {

/// One way to do a training step on every rank.
class StepContender {
 public:
  virtual ~StepContender() = default;
  StepContender() = default;
  StepContender(const StepContender&) = delete;
  StepContender& operator=(const StepContender&) = delete;

  virtual std::string name() const = 0;
  /// The timed part: clears the gradients, computes them, exchanges them, updates the parameters.
  virtual void run() = 0;
  /// Releases the gradients and waits until no thread that run() has woken uses a core any more.
  virtual void rest() = 0;
  /// Whether only rank 0 runs it, while the other ranks sleep.
  virtual bool on_one_rank() const { return false; }
  /// Runs a step and describes the error in the gradients after it; no value when they are right.
  /// Collective.
  virtual std::optional<std::string> fault() = 0;
};

enum class Update { kSgd, kAdamW };

struct WorkloadOptions {
  ParameterSet set;
  /// Whether to run the network of the mnist example, forward and backward, on random images.
  /// Otherwise each gradient comes from a layer whose backward only writes it.
  bool compute = false;
  Update update = Update::kSgd;
  int batch_size = 64;
};

/// The parameters of a measurement. All contenders share their values; each contender has its own
/// gradients and hooks.
class Workload {
 public:
  virtual ~Workload() = default;
  /// @throws std::invalid_argument for a name that is not in step_contender_names().
  virtual std::unique_ptr<StepContender> contender(const std::string& name) = 0;
};

/// Returns the names of all contenders. The first two do not exchange gradients: "one" (rank 0
/// alone on the machine) and "alone" (all ranks at the same time). Then come hvd's contenders and
/// its peers.
std::vector<std::string> step_contender_names();

/// @param session must outlive the workload.
/// @throws std::invalid_argument when there is no network with that parameter set.
std::unique_ptr<Workload> make_workload(const WorkloadOptions&, const Session& session);

/// Describes LibTorch: its version, and the number of threads that it computes with.
Json describe_torch();
/// Sets the number of LibTorch's threads. @param threads of this rank; 0: the cores divided by the
/// ranks of this host
void share_out_threads(int threads);

}  // namespace hvd::bench
