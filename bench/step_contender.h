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
  /// Releases the gradients and waits until no work of run() uses a core any more.
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
  /// The example's network itself, forward and backward, on made-up images. Otherwise each gradient
  /// comes from a layer whose backward only writes it.
  bool compute = false;
  Update update = Update::kSgd;
  int batch_size = 64;
};

/// Parameters whose values all contenders share, each with gradients and hooks of its own.
class Workload {
 public:
  virtual ~Workload() = default;
  /// @throws std::invalid_argument for a name that is not in step_contender_names().
  virtual std::unique_ptr<StepContender> contender(const std::string& name) = 0;
};

/// The ones without an exchange first: "one" (rank 0 alone on the machine), "alone" (all ranks side
/// by side). Then hvd's, and its peers.
std::vector<std::string> step_contender_names();

/// @param session must outlive the workload.
/// @throws std::invalid_argument when there is no network with that parameter set.
std::unique_ptr<Workload> make_workload(const WorkloadOptions&, const Session& session);

/// Threads that LibTorch computes with, and its version, for the description of a run.
Json describe_torch();
/// @param threads of this rank; 0: the cores divided by the ranks of this host
void share_out_threads(int threads);

}  // namespace hvd::bench
