#include <c10/util/Type.h>

#include <algorithm>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "accelerator/core.h"
#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"
#include "operations/membership.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/parameter_groups.h"
#include "tensors/script_module.h"

namespace hvd {

using libtorch::AcceleratorCore;
using libtorch::Fact;
using libtorch::LoaderProgress;
using libtorch::parameters_of;
using libtorch::PrepareArgument;
using libtorch::PreparedModule;
using libtorch::PreparedScheduler;
using torch::optim::Optimizer;

NamedParameters libtorch::parameters_of(const PreparedModule& module) {
  return module.script ? script_parameters(*module.script, "Accelerator::prepare")
                       : module.module->named_parameters();
}

namespace {

/// The object that identifies a module among all prepared objects; null for a null or empty module.
const void* identity_of(const PreparedModule& module) {
  if (!module.script) return module.module;
  return libtorch::is_empty_script(*module.script) ? nullptr : module.script->_ivalue().get();
}

std::string name_of(const PreparedModule& module) {
  return module.script ? libtorch::script_name(*module.script) : module.module->name();
}

std::string type_of(const Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

/// Checks the arguments of a call of prepare() before any of them changes.
class ArgumentCheck {
 public:
  ArgumentCheck(const AcceleratorCore& core, const std::vector<PrepareArgument>& arguments);

  /// The first error; empty if the arguments are valid.
  std::string error();
  /// Descriptions of the arguments, to compare between ranks.
  std::vector<Fact> facts() const;

 private:
  std::string error_in(const PreparedModule& module);
  std::string error_in(const Optimizer* optimizer);
  std::string error_in(const PreparedScheduler& scheduler);
  std::string error_in(const std::shared_ptr<LoaderProgress>& loader);
  std::string error_in_parameters(const Optimizer& optimizer) const;
  /// The error if the object is null, already prepared or occurs twice; otherwise empty.
  std::string error_in_use(const void* object, const char* what);

  void add(const PreparedModule& module);

  const AcceleratorCore& core_;
  const std::vector<PrepareArgument>& arguments_;
  std::set<const void*> used_;
  std::set<const c10::TensorImpl*> parameters_;  ///< of all prepared modules
};

ArgumentCheck::ArgumentCheck(const AcceleratorCore& core,
                             const std::vector<PrepareArgument>& arguments)
    : core_(core), arguments_(arguments) {
  for (const PreparedModule& module : core.modules) {
    used_.insert(identity_of(module));
    add(module);
  }
  for (const auto& optimizer : core.optimizers) used_.insert(&optimizer->inner());
  for (const auto& scheduler : core.schedulers) used_.insert(AcceleratorCore::inner_of(*scheduler));
  for (const auto& loader : core.loaders) used_.insert(loader.get());
  for (const PrepareArgument& argument : arguments)
    if (const auto* const module = std::get_if<PreparedModule>(&argument)) add(*module);
}

void ArgumentCheck::add(const PreparedModule& module) {
  if (identity_of(module) == nullptr) return;
  for (const auto& item : parameters_of(module))
    parameters_.insert(item.value().unsafeGetTensorImpl());
}

std::string ArgumentCheck::error() {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const std::string error =
        std::visit([this](const auto& argument) { return error_in(argument); }, arguments_[i]);
    if (!error.empty()) return text("Accelerator::prepare: argument ", i, ": ", error);
  }
  return {};
}

std::string ArgumentCheck::error_in_use(const void* object, const char* what) {
  if (object == nullptr) return text("the ", what, " is null; expected a pointer to one");
  if (used_.insert(object).second) return {};
  return text("the ", what,
              " is prepared already; expected each object once: keep what the first prepare() has "
              "returned, or call free_memory() before another training");
}

std::string ArgumentCheck::error_in(const PreparedModule& module) {
  const void* const identity = identity_of(module);
  if (identity == nullptr) return "the module is null; expected a module";
  std::string error = error_in_use(identity, "module");
  if (!error.empty()) return error;
  if (module.script && core_.options.sync_batch_norm) {
    try {
      convert_sync_batchnorm(*module.script);
    } catch (const UsageError& refused) {
      return refused.what();
    }
  }
  for (const auto& item : parameters_of(module)) {
    if (!libtorch::LiveOptimizers::instance().trains(item.value())) continue;
    return text("parameter '", item.key(), "' of ", name_of(module),
                " belongs to an optimizer that is wrapped already; expected the module to be "
                "prepared before its optimizer or in the same call, and the optimizer not to be "
                "wrapped by the program");
  }
  return {};
}

std::string ArgumentCheck::error_in(const Optimizer* optimizer) {
  std::string error = error_in_use(optimizer, "optimizer");
  if (!error.empty()) return error;
  if (dynamic_cast<const OptimizerWrapper*>(optimizer) != nullptr) {
    return text("the optimizer is a ", type_of(*optimizer),
                "; expected the optimizer that it wraps, since prepare() wraps it");
  }
  return error_in_parameters(*optimizer);
}

std::string ArgumentCheck::error_in_parameters(const Optimizer& optimizer) const {
  std::size_t all = 0, unknown = 0;
  std::string first;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i, ++all) {
      const torch::Tensor& parameter = params[i];
      if (core_.options.device_placement && parameter.device() != core_.device &&
          !optimizer.state().empty()) {
        return text(type_of(optimizer), " has a state on ", parameter.device().str(),
                    " already, and prepare() moves the parameters to ", core_.device.str(),
                    "; expected an optimizer that has not stepped: prepare it before its first "
                    "step, or before its state is loaded");
      }
      if (parameters_.contains(parameter.unsafeGetTensorImpl())) continue;
      if (unknown++ == 0) {
        first = text("parameter ", i, " of parameter group ", g, ", shape ",
                     shape_to_string(parameter.sizes().vec()));
      }
    }
  }
  if (unknown == 0) return {};
  if (unknown == all) {
    return text("none of the ", all, " parameters of ", type_of(optimizer),
                " belongs to a prepared module; pass the module to prepare() in the same call or "
                "before. If it is prepared, its parameters were replaced after the optimizer was "
                "constructed: construct the optimizer after that");
  }
  return text(first, ", and ", unknown - 1, " more of the ", all, " parameters of ",
              type_of(optimizer),
              " belong to no prepared module: they were replaced after the optimizer was "
              "constructed, or their module is not prepared; construct the optimizer after the "
              "replacement, and prepare every module that it trains");
}

std::string ArgumentCheck::error_in(const PreparedScheduler& scheduler) {
  return std::visit([this](const auto* object) { return error_in_use(object, "scheduler"); },
                    scheduler);
}

std::string ArgumentCheck::error_in(const std::shared_ptr<LoaderProgress>& loader) {
  std::string error = error_in_use(loader.get(), "loader");
  if (!error.empty()) return error;
  const LoaderProgress& progress = *loader;
  const std::string& name = progress.options().name;
  // A worker that is not a rank yet cannot determine the number of ranks.
  if (libtorch::waits_for_rank() && progress.options().process_set.id() == 0) return {};
  if (progress.options().process_set.size() != size()) {
    return text("the loader '", name, "' divides its samples among ",
                progress.options().process_set.size(), " of ", size(),
                " ranks; expected a loader for all ranks (DataLoaderOptions::process_set)");
  }
  if (progress.samples_per_epoch() < static_cast<std::size_t>(size())) {
    return text("the loader '", name, "' has ", progress.samples_per_epoch(),
                " samples in an epoch, and the job has ", size(),
                " ranks; expected at least one sample for each rank: use fewer ranks or a larger "
                "data set");
  }
  return {};
}

std::vector<Fact> ArgumentCheck::facts() const {
  std::vector<Fact> facts;
  const auto add_fact = [&](const std::string& value) {
    facts.emplace_back(text("argument ", facts.size()), value);
  };
  for (const PrepareArgument& argument : arguments_) {
    if (const auto* const module = std::get_if<PreparedModule>(&argument)) {
      if (identity_of(*module) != nullptr)
        add_fact(text("the module ", name_of(*module), " with ", parameters_of(*module).size(),
                      " parameters"));
    } else if (auto* const* const optimizer = std::get_if<Optimizer*>(&argument)) {
      if (*optimizer != nullptr)
        add_fact(text("the optimizer ", type_of(**optimizer), ", ",
                      join_text(libtorch::group_lines(**optimizer), "; ")));
    } else if (std::holds_alternative<PreparedScheduler>(argument)) {
      add_fact("a scheduler");
    } else if (const auto* const loader = std::get_if<std::shared_ptr<LoaderProgress>>(&argument)) {
      if (*loader) add_fact(text("a loader of ", (*loader)->samples_per_epoch(), " samples"));
    }
  }
  return facts;
}

/// The parameters of all modules. Each name begins with its module's number, as "model0.".
NamedParameters all_named(const std::vector<PreparedModule>& modules) {
  NamedParameters named;
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    for (const auto& item : parameters_of(modules[i])) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second)
        named.insert(text("model", i, ".", item.key()), item.value());
    }
  }
  return named;
}

/// The prepared module that has all parameters of the optimizer; null if there is none.
const PreparedModule* only_module(const std::vector<PreparedModule>& modules,
                                  const Optimizer& optimizer) {
  for (const PreparedModule& module : modules) {
    std::set<const c10::TensorImpl*> own;
    for (const auto& item : parameters_of(module)) own.insert(item.value().unsafeGetTensorImpl());
    bool all = true;
    for (const auto& group : optimizer.param_groups())
      for (const torch::Tensor& parameter : group.params())
        all = all && own.contains(parameter.unsafeGetTensorImpl());
    if (all) return &module;
  }
  return nullptr;
}

/// Warns if ranks get batches of different sizes, because the means over these batches would have
/// equal weights.
void warn_of_uneven_batches(const LoaderProgress& loader) {
  const bool uneven = loader.options().remainder == Remainder::kUneven;
  if (!uneven || libtorch::waits_for_rank() || size() == 1 || rank() != 0) return;
  TORCH_WARN(
      "hvd: Accelerator::prepare: the loader '", loader.options().name,
      "' gives the ranks batches of different sizes (Remainder::kUneven). For training, pass "
      "the number of samples, backward(loss, {.weight = n}), so that all samples have "
      "the same weight; otherwise the means of all ranks have the same weight");
}

}  // namespace

void AcceleratorCore::prepare(const std::vector<PrepareArgument>& arguments) {
  forget_ended_loaders();
  ArgumentCheck check(*this, arguments);
  // A worker that has just become a rank opens its loaders while the other ranks continue with
  // theirs.
  const bool only_loaders = std::ranges::all_of(arguments, [](const PrepareArgument& argument) {
    return std::holds_alternative<std::shared_ptr<LoaderProgress>>(argument);
  });
  if (waits_for_rank() || (is_elastic() && only_loaders)) {
    if (const std::string error = check.error(); !error.empty()) throw UsageError(error);
    return prepare_each(arguments);
  }
  agree({.name = "accelerator.prepare",
         .title = "Accelerator::prepare",
         .verb = "passes",
         .expected = "expected the same arguments on every rank"},
        check.error(), check.facts());
  prepare_each(arguments);
}

void AcceleratorCore::prepare_each(const std::vector<PrepareArgument>& arguments) {
  // Prepare the modules first: an optimizer's state begins on the device of its parameters.
  for (const PrepareArgument& argument : arguments)
    if (const auto* const module = std::get_if<PreparedModule>(&argument)) prepare_module(*module);
  for (const PrepareArgument& argument : arguments) {
    if (auto* const* const optimizer = std::get_if<Optimizer*>(&argument))
      prepare_optimizer(**optimizer);
    if (const auto* const loader = std::get_if<std::shared_ptr<LoaderProgress>>(&argument)) {
      loaders.push_back(*loader);
      warn_of_uneven_batches(**loader);
    }
  }
  prepare_schedulers(arguments);
}

void AcceleratorCore::prepare_module(const PreparedModule& prepared) {
  const auto identities = [&prepared] {
    std::vector<const c10::TensorImpl*> all;
    for (const auto& item : parameters_of(prepared))
      all.push_back(item.value().unsafeGetTensorImpl());
    return all;
  };
  const auto before = identities();
  with_module(prepared, [this](auto& module) {
    if (options.sync_batch_norm) convert_sync_batchnorm(module);
    if (options.device_placement) module.to(device);
  });
  if (identities() != before) {
    throw UsageError(text("Accelerator::prepare: the move of ", name_of(prepared), " to ",
                          device.str(),
                          " has replaced parameters, which its optimizer does not train; expected "
                          "the same tensors: move the module before the optimizer is constructed"));
  }
  modules.push_back(prepared);
  if (waits_for_rank()) return;
  with_module(prepared, [](auto& module) {
    if (!StateDict(module).tensors().empty()) broadcast_parameters(module);
  });
}

void AcceleratorCore::prepare_optimizer(Optimizer& optimizer) {
  const auto wrap = [&](const auto& names) -> AcceleratedOptimizer::Wrapper {
    if (options.sharded) {
      return std::make_unique<ShardedOptimizer>(
          optimizer, names, ShardedOptimizerOptions{.compression = options.compression});
    }
    return std::make_unique<DistributedOptimizer>(
        optimizer, names, DistributedOptimizerOptions{.compression = options.compression});
  };
  const PreparedModule* const module = only_module(modules, optimizer);
  auto wrapper = module != nullptr ? with_module(*module, wrap) : wrap(all_named(modules));
  optimizers.push_back(std::unique_ptr<AcceleratedOptimizer>(
      new AcceleratedOptimizer(*this, optimizer, std::move(wrapper))));
}

/// Binds each scheduler of a call to its optimizers; see docs/accelerator.md.
void AcceleratorCore::prepare_schedulers(const std::vector<PrepareArgument>& arguments) {
  std::vector<const AcceleratedOptimizer*> of_call, all;
  for (const auto& optimizer : optimizers) {
    all.push_back(optimizer.get());
    for (const PrepareArgument& argument : arguments) {
      auto* const* const own = std::get_if<Optimizer*>(&argument);
      if (own != nullptr && *own == &optimizer->inner_) of_call.push_back(optimizer.get());
    }
  }
  std::vector<PreparedScheduler> added;
  for (const PrepareArgument& argument : arguments)
    if (const auto* const one = std::get_if<PreparedScheduler>(&argument)) added.push_back(*one);
  for (std::size_t i = 0; i < added.size(); ++i) {
    std::vector<const AcceleratedOptimizer*> bound = of_call.empty() ? all : of_call;
    if (of_call.size() == added.size()) bound = {of_call[i]};
    schedulers.push_back(std::unique_ptr<AcceleratedScheduler>(
        new AcceleratedScheduler(*this, added[i], std::move(bound))));
  }
}

void AcceleratorCore::forget_ended_loaders() {
  std::erase_if(loaders, [](const auto& progress) { return progress.use_count() == 1; });
}

const void* AcceleratorCore::inner_of(const AcceleratedScheduler& scheduler) {
  return std::visit([](const auto* inner) -> const void* { return inner; }, scheduler.inner_);
}

void Accelerator::prepare_all(std::vector<PrepareArgument> arguments) { core_->prepare(arguments); }

AcceleratedOptimizer& Accelerator::prepared(const Optimizer& optimizer) const {
  for (const auto& one : core_->optimizers)
    if (&one->inner_ == &optimizer) return *one;
  throw UsageError("Accelerator: the optimizer is not prepared");
}

AcceleratedScheduler& Accelerator::prepared(const PreparedScheduler& scheduler) const {
  const void* const inner =
      std::visit([](const auto* object) -> const void* { return object; }, scheduler);
  for (const auto& one : core_->schedulers)
    if (AcceleratorCore::inner_of(*one) == inner) return *one;
  throw UsageError("Accelerator: the scheduler is not prepared");
}

std::shared_ptr<libtorch::RunningLoaders> Accelerator::running_loaders() const {
  return core_->running;
}

std::optional<torch::Device> Accelerator::placement() const {
  if (!core_->options.device_placement) return std::nullopt;
  return core_->device;
}

}  // namespace hvd
