#include "hvd/accelerator.h"

#include <ATen/autocast_mode.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "accelerator/core.h"
#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"
#include "operations/membership.h"

namespace hvd {
namespace {

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kNo:
      return "no";
    case Precision::kFP16:
      return "fp16";
    case Precision::kBF16:
      return "bf16";
  }
  return "unknown";
}

const char* yes_or_no(bool value) { return value ? "true" : "false"; }

/// The options that must be equal on all ranks, except those of the loss scale.
std::vector<libtorch::Fact> facts_of(const AcceleratorOptions& options, torch::Device device) {
  return {{"mixed_precision", name_of(options.mixed_precision)},
          {"gradient_accumulation_steps", text(options.gradient_accumulation_steps)},
          {"sharded", yes_or_no(options.sharded)},
          {"type of device", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
          {"sync_batch_norm", yes_or_no(options.sync_batch_norm)},
          {"device_placement", yes_or_no(options.device_placement)},
          {"step_scheduler_with_optimizer", yes_or_no(options.step_scheduler_with_optimizer)},
          {"compression", text(static_cast<int>(options.compression))}};
}

/// Checks that all ranks have the same options, and returns the loss scaler. Collective, unless the
/// process waits for a rank. @throws as Accelerator()
GradScaler agreed_scaler(const AcceleratorOptions& options, torch::Device device) {
  std::string error;
  if (options.gradient_accumulation_steps < 1) {
    error = text("Accelerator: gradient_accumulation_steps: expected at least 1, got ",
                 options.gradient_accumulation_steps);
  }
  GradScalerOptions scaling = options.grad_scaler;
  scaling.enabled = options.mixed_precision == Precision::kFP16;
  scaling.process_set = {};
  std::optional<GradScaler> scaler;
  try {
    scaler.emplace(scaling);
  } catch (const UsageError& refused) {
    if (error.empty()) error = text("Accelerator: grad_scaler: ", refused.what());
  }
  if (libtorch::waits_for_rank()) {
    if (!error.empty()) throw UsageError(error);
    return *scaler;
  }
  std::vector<libtorch::Fact> facts = facts_of(options, device);
  facts.emplace_back(
      "grad_scaler",
      text("scale ", scaling.init_scale, ", growth ", scaling.growth_factor, ", backoff ",
           scaling.backoff_factor, ", interval ", scaling.growth_interval));
  libtorch::agree({.name = "accelerator.construct",
                   .title = "Accelerator",
                   .expected = "expected the same options on every rank"},
                  error, facts);
  return *scaler;
}

void warn_of(const char* where, const std::exception& error) {
  TORCH_WARN("hvd: ", where, ": ", error.what());
}

}  // namespace

namespace libtorch {

bool is_elastic() { return waits_for_rank() || elastic::generation() > 0; }

JobMembership::JobMembership(const Options& options) {
  if (is_initialized()) return;
  init(options);
  owned_ = true;
}

JobMembership::~JobMembership() {
  if (!owned_) return;
  try {
    shutdown();
  } catch (const std::exception& error) {
    warn_of("the shutdown() at the end of an Accelerator failed", error);
  }
}

AcceleratorCore::AcceleratorCore(AcceleratorOptions given)
    : job(given.init),
      options(std::move(given)),
      device(options.cpu || waits_for_rank() ? torch::Device(torch::kCPU) : hvd::device()),
      scaler(agreed_scaler(options, device)) {}

void AcceleratorCore::update_scale() {
  const bool in_use = std::any_of(optimizers.begin(), optimizers.end(),
                                  [](const auto& optimizer) { return optimizer->unscaled_; });
  if (!scale_is_due || in_use) return;
  scaler.update();
  scale_is_due = false;
}

void AcceleratorCore::forget_step() {
  sync = true;
  passes = 0;
  scale_is_due = false;
  trigger = false;
  for (const auto& optimizer : optimizers) {
    optimizer->unscaled_ = optimizer->skipped_ = false;
    optimizer->wrapper().zero_grad();
  }
}

std::vector<NoSync> AcceleratorCore::no_sync() const {
  std::vector<NoSync> guards;
  for (const auto& optimizer : optimizers) guards.push_back(optimizer->wrapper().no_sync());
  return guards;
}

std::vector<AcceleratedOptimizer*> AcceleratorCore::optimizers_of(
    const std::vector<torch::Tensor>& parameters, const char* caller) const {
  if (optimizers.empty()) {
    throw UsageError(text("Accelerator::", caller,
                          ": no optimizer is prepared; expected prepare() with one before"));
  }
  std::set<const c10::TensorImpl*> wanted;
  for (const torch::Tensor& parameter : parameters)
    if (parameter.requires_grad()) wanted.insert(parameter.unsafeGetTensorImpl());
  std::vector<AcceleratedOptimizer*> owners;
  for (const auto& optimizer : optimizers) {
    const std::size_t before = wanted.size();
    for (const auto& group : optimizer->inner_.param_groups())
      for (const torch::Tensor& parameter : group.params())
        wanted.erase(parameter.unsafeGetTensorImpl());
    if (wanted.size() < before) owners.push_back(optimizer.get());
  }
  if (owners.empty() || !wanted.empty()) {
    throw UsageError(text("Accelerator::", caller, ": ", wanted.size(), " of ", parameters.size(),
                          " parameters belong to no prepared optimizer; expected parameters that "
                          "an optimizer of prepare() trains"));
  }
  return owners;
}

}  // namespace libtorch

std::string to_string(const AcceleratorState& state) {
  return text("num_processes: ", state.num_processes, "\nprocess_index: ", state.process_index,
              "\nlocal_process_index: ", state.local_process_index,
              "\ndevice: ", state.device.str(),
              "\nmixed_precision: ", name_of(state.mixed_precision),
              "\ngradient_accumulation_steps: ", state.gradient_accumulation_steps,
              "\nsharded: ", yes_or_no(state.sharded), "\n");
}

std::ostream& operator<<(std::ostream& stream, const AcceleratorState& state) {
  return stream << to_string(state);
}

Accelerator::Accelerator(AcceleratorOptions options)
    : core_(std::make_unique<libtorch::AcceleratorCore>(std::move(options))) {}

Accelerator::~Accelerator() = default;

// --- A training step ---

Accumulation Accelerator::accumulate() {
  const libtorch::BatchPlace* const batch = core_->running->place();
  ++core_->passes;
  core_->sync = core_->passes >= core_->options.gradient_accumulation_steps ||
                (batch != nullptr && batch->last);
  if (!core_->sync) return no_sync();
  core_->passes = 0;
  return Accumulation({});
}

bool Accelerator::sync_gradients() const noexcept { return core_->sync; }

int Accelerator::gradient_accumulation_steps() const noexcept {
  return core_->options.gradient_accumulation_steps;
}

Accumulation Accelerator::no_sync() { return Accumulation(core_->no_sync()); }

/// Marks a backward pass for all prepared optimizers. The pass may reach only some of them.
class Accelerator::WeightedPass {
 public:
  // The object exists once the first constructor has returned, so its destructor ends the passes
  // that have begun when begin_pass() of a later optimizer throws.
  WeightedPass(const libtorch::AcceleratorCore& core, std::optional<std::int64_t> weight)
      : WeightedPass(core) {
    for (const auto& optimizer : core_.optimizers) {
      optimizer->wrapper().begin_pass(weight);
      ++begun_;
    }
  }
  WeightedPass(const WeightedPass&) = delete;
  WeightedPass& operator=(const WeightedPass&) = delete;
  ~WeightedPass() {
    for (std::size_t i = 0; i < begun_; ++i) core_.optimizers[i]->wrapper().end_pass();
  }

 private:
  explicit WeightedPass(const libtorch::AcceleratorCore& core) : core_(core) {}

  const libtorch::AcceleratorCore& core_;
  std::size_t begun_ = 0;
};

void Accelerator::backward(const torch::Tensor& loss, BackwardOptions options) {
  if (!loss.defined())
    throw UsageError("Accelerator::backward: the loss is undefined; expected a tensor");
  if (options.weight && core_->optimizers.empty()) {
    throw UsageError(
        "Accelerator::backward: weight: no optimizer is prepared; expected prepare() with one "
        "before");
  }
  core_->update_scale();
  const int steps = options.weight ? 1 : gradient_accumulation_steps();
  const WeightedPass pass(*core_, options.weight);
  core_->scaler.scale(steps == 1 ? loss : loss / steps).backward({}, options.retain_graph);
}

double Accelerator::clip_grad_norm_(double max_norm, double norm_type) {
  const auto& optimizers = core_->optimizers;
  if (optimizers.size() == 1) return optimizers.front()->clip_grad_norm_(max_norm, norm_type);
  std::vector<torch::Tensor> parameters;
  for (const auto& optimizer : optimizers)
    for (const auto& group : optimizer->inner_.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return clip_grad_norm_(parameters, max_norm, norm_type);
}

double Accelerator::clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                                    double norm_type) {
  if (!core_->sync) return 0;
  const auto owners = core_->optimizers_of(parameters, "clip_grad_norm_");
  if (core_->options.sharded) {
    if (owners.size() == 1) return owners.front()->clip_grad_norm_(max_norm, norm_type);
    throw UsageError(
        text("Accelerator::clip_grad_norm_: the parameters belong to ", owners.size(),
             " sharded optimizers; expected those of one: call clip_grad_norm_() of each optimizer "
             "that prepare() has returned"));
  }
  for (AcceleratedOptimizer* const owner : owners) owner->unscale_gradients();
  return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
}

void Accelerator::clip_grad_value_(double clip_value) {
  for (const auto& optimizer : core_->optimizers) optimizer->clip_grad_value_(clip_value);
}

void Accelerator::clip_grad_value_(const std::vector<torch::Tensor>& parameters,
                                   double clip_value) {
  if (!core_->sync) return;
  for (AcceleratedOptimizer* const owner : core_->optimizers_of(parameters, "clip_grad_value_")) {
    core_->options.sharded ? owner->clip_grad_value_(clip_value) : owner->unscale_gradients();
  }
  if (!core_->options.sharded) torch::nn::utils::clip_grad_value_(parameters, clip_value);
}

void Accelerator::unscale_gradients() {
  for (const auto& optimizer : core_->optimizers) optimizer->unscale_gradients();
}

bool Accelerator::optimizer_step_was_skipped() const noexcept {
  return std::any_of(core_->optimizers.begin(), core_->optimizers.end(),
                     [](const auto& optimizer) { return optimizer->step_was_skipped(); });
}

double Accelerator::loss_scale() const {
  core_->update_scale();
  return core_->scaler.get_scale();
}

Autocast Accelerator::autocast() const {
  const torch::DeviceType type = core_->device.type();
  switch (core_->options.mixed_precision) {
    case Precision::kFP16:
      return Autocast(core_->device, torch::kFloat16);
    case Precision::kBF16:
      return Autocast(core_->device, torch::kBFloat16);
    case Precision::kNo:
      break;
  }
  // Keeps the program's own setting.
  return Autocast(core_->device, at::autocast::get_autocast_dtype(type),
                  at::autocast::is_autocast_enabled(type));
}

// --- Elastic jobs ---

void Accelerator::run(const std::function<void()>& body, const ElasticRunOptions& options) {
  if (!body) throw UsageError("Accelerator::run: expected a function");
  if (!options.resume_from) return run(core_->prepared_state(), body, options, nullptr);
  bool load_due = false;  // the ranks have a first state, without the checkpoint
  TrainingState all = core_->prepared_state();
  all.value("accelerator.load_due", load_due);
  const auto load_and_train = [&] {
    if (std::exchange(load_due, false)) {
      if (load_checkpoint(*options.resume_from, training_state())) core_->tracked->commit_loaded();
    }
    body();
  };
  run(all, load_and_train, options, [&] { load_due = true; });
}

void Accelerator::run(const TrainingState& all, const std::function<void()>& body,
                      const ElasticRunOptions& options, const std::function<void()>& load) {
  libtorch::AcceleratorCore& core = *core_;
  if (core.tracked != nullptr)
    throw UsageError("Accelerator::run: called in the function of run(); expected one call");
  const elastic::Copy copy = core.options.sharded ? elastic::Copy::kAtCommit : options.copy;
  elastic::TorchState state(elastic::TorchStateOptions{.copy = copy});
  state.track(all).random(options.seed);
  std::string agreed;
  for (const auto& [name, value] : facts_of(core.options, core.device))
    agreed += text(agreed.empty() ? "" : ", ", name, " ", value);
  // The ranks compare the types of the items that they track.
  static_cast<elastic::State&>(state).track(
      elastic::Part{.name = "accelerator",
                    .type = std::move(agreed),
                    .view = [] { return std::span<const std::byte>(); },
                    .room = [](std::size_t) { return std::span<std::byte>(); }});
  if (options.on_change) state.on_change(options.on_change);
  core.tracked = &state;
  const std::shared_ptr<const void> in_run(nullptr, [&core](auto) { core.tracked = nullptr; });
  elastic::run(state,
               [&] {
                 core.forget_step();
                 body();
               },
               {.load = load});
}

void Accelerator::commit() {
  if (core_->tracked == nullptr)
    throw UsageError("Accelerator::commit: called outside the function of Accelerator::run()");
  if (!core_->sync) return;
  core_->update_scale();
  core_->tracked->commit();
}

std::uint64_t Accelerator::commits() const noexcept {
  return core_->tracked == nullptr ? 0 : core_->tracked->commits();
}

// --- The job ---

torch::Device Accelerator::device() const noexcept { return core_->device; }

AcceleratorState Accelerator::state() const {
  return {.device = core_->device,
          .num_processes = num_processes(),
          .process_index = process_index(),
          .local_process_index = local_process_index(),
          .mixed_precision = core_->options.mixed_precision,
          .gradient_accumulation_steps = core_->options.gradient_accumulation_steps,
          .sharded = core_->options.sharded};
}

int Accelerator::num_processes() const { return size(); }
int Accelerator::process_index() const { return rank(); }
int Accelerator::local_process_index() const { return local_rank(); }

void Accelerator::wait_for_everyone() { barrier(); }

MainProcessFirst Accelerator::main_process_first() const {
  return MainProcessFirst(is_main_process());
}

MainProcessFirst::MainProcessFirst(bool main) : main_(main) {
  if (!main_) barrier();
}

MainProcessFirst::~MainProcessFirst() {
  if (!main_) return;
  try {
    barrier();
  } catch (const std::exception& error) {
    warn_of("the other ranks have not left main_process_first()", error);
  }
}

void Accelerator::set_trigger() noexcept { core_->trigger = true; }

bool Accelerator::check_trigger() {
  const torch::Tensor set = allreduce(torch::tensor(core_->trigger ? 1 : 0, torch::kInt32),
                                      {.name = "accelerator.check_trigger", .op = ReduceOp::kMax});
  core_->trigger = false;
  return set.item<std::int32_t>() != 0;
}

}  // namespace hvd
