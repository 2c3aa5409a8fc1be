#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/accelerator.h"

namespace hvd::libtorch {

/// The parameters of a prepared module, by name. The module must not be null.
NamedParameters parameters_of(const PreparedModule& module);

/// Calls `act` with the module, of either type, which must not be null.
template <class Act>
auto with_module(const PreparedModule& module, const Act& act) {
  if (!module.script) return act(*module.module);
  torch::jit::Module script = *module.script;  // refers to the same module
  return act(script);
}

/// Joins the job unless the process has already joined it. The destructor leaves the job if the
/// constructor has joined it.
class JobMembership {
 public:
  explicit JobMembership(const Options& options);
  JobMembership(const JobMembership&) = delete;
  JobMembership& operator=(const JobMembership&) = delete;
  ~JobMembership();

 private:
  bool owned_ = false;
};

/// Whether this process is a worker of an elastic job. Before elastic::run() the ranks cannot
/// communicate: they compare their arguments, and get equal parameters, when they join in run().
bool is_elastic();

/// The state of an Accelerator, which prepared objects refer to. Not thread-safe.
struct AcceleratorCore {
  explicit AcceleratorCore(AcceleratorOptions options);

  bool half() const noexcept { return options.mixed_precision == Precision::kFP16; }
  /// Modules, optimizers, schedulers, loaders, the loss scale, and registered objects.
  TrainingState prepared_state();
  /// Drops the remains of an interrupted step.
  void forget_step();
  /// Checks the arguments of prepare() on all ranks, and prepares them. Collective, except in a
  /// process that has no rank yet, and when the function of an elastic job prepares only loaders.
  void prepare(const std::vector<PrepareArgument>& arguments);
  /// Adjusts the loss scale after the steps of the last pass. Does nothing while an optimizer has
  /// unscaled gradients that it has not used yet, because it would divide them again.
  void update_scale();
  std::vector<NoSync> no_sync() const;
  /// The prepared optimizers that train at least one of the parameters.
  /// @throws UsageError when a parameter that requires a gradient is in no prepared optimizer
  std::vector<AcceleratedOptimizer*> optimizers_of(const std::vector<torch::Tensor>& parameters,
                                                   const char* caller) const;

  /// Forgets loaders that the program has destroyed.
  void forget_ended_loaders();
  /// The program's scheduler, which `scheduler` wraps.
  static const void* inner_of(const AcceleratedScheduler& scheduler);

  const JobMembership job;  // destroyed last
  const AcceleratorOptions options;
  torch::Device device = torch::kCPU;
  GradScaler scaler;
  bool scale_is_due = false;  ///< gradients were unscaled since the last update of the scale
  bool sync = true;           ///< a step is due in the current pass
  std::int64_t passes = 0;    ///< calls of accumulate() since the last step that was due
  bool trigger = false;
  elastic::TorchState* tracked = nullptr;  ///< in run()
  std::shared_ptr<RunningLoaders> running = std::make_shared<RunningLoaders>();

  std::vector<PreparedModule> modules;
  std::vector<std::unique_ptr<AcceleratedOptimizer>> optimizers;
  std::vector<std::unique_ptr<AcceleratedScheduler>> schedulers;
  std::vector<std::shared_ptr<LoaderProgress>> loaders;
  std::vector<std::function<void(TrainingState&, const std::string&)>> registered;

 private:
  void prepare_each(const std::vector<PrepareArgument>& arguments);
  void prepare_module(const PreparedModule& module);
  void prepare_optimizer(torch::optim::Optimizer& optimizer);
  void prepare_schedulers(const std::vector<PrepareArgument>& arguments);
};

}  // namespace hvd::libtorch
