#include <ATen/DeviceAccelerator.h>

#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "accelerator/core.h"
#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"

namespace hvd {
namespace {

/// "model", "model_1", "model_2", ...
std::string numbered_name(const char* base, std::size_t index) {
  return index == 0 ? std::string(base) : text(base, '_', index);
}

}  // namespace

void Accelerator::add_registered(Recorder recorder) {
  core_->registered.push_back(std::move(recorder));
}

TrainingState Accelerator::training_state() {
  core_->update_scale();
  return core_->prepared_state().random().value("accumulated_passes", core_->passes);
}

TrainingState libtorch::AcceleratorCore::prepared_state() {
  forget_ended_loaders();
  TrainingState state;
  for (std::size_t i = 0; i < modules.size(); ++i)
    with_module(modules[i], [&](auto& module) { state.model(module, numbered_name("model", i)); });
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    std::visit(
        [&](const auto& wrapper) { state.optimizer(*wrapper, numbered_name("optimizer", i)); },
        optimizers[i]->wrapper_);
  }
  for (std::size_t i = 0; i < schedulers.size(); ++i) {
    std::visit([&](auto* inner) { state.scheduler(*inner, numbered_name("scheduler", i)); },
               schedulers[i]->inner_);
  }
  for (std::size_t i = 0; i < loaders.size(); ++i)
    state.progress(loaders[i], numbered_name("loader", i));
  if (half()) state.scaler(scaler);
  for (std::size_t i = 0; i < registered.size(); ++i) registered[i](state, text("registered_", i));
  return state;
}

std::uint64_t Accelerator::save_state(const std::filesystem::path& folder,
                                      const SaveCheckpointOptions& options) {
  if (!core_->sync && is_main_process()) {
    TORCH_WARN_ONCE(
        "hvd: Accelerator::save_state in the middle of an accumulation: the gradients of ",
        core_->passes,
        " passes are not saved, so a resumed run differs from this one; expected a call where "
        "sync_gradients() is true");
  }
  return save_checkpoint(folder, training_state(), options);
}

std::uint64_t Accelerator::load_state(const std::filesystem::path& folder,
                                      const LoadCheckpointOptions& options) {
  const std::optional<std::uint64_t> step = load_checkpoint(folder, training_state(), options);
  if (!step) {
    throw CheckpointError("Accelerator::load_state: no complete checkpoint in '" + folder.string() +
                          "'; expected a folder that save_state() has written, which every rank "
                          "can read");
  }
  core_->sync = true;
  return *step;
}

void Accelerator::save_model(const StateDict& model, const std::filesystem::path& folder) const {
  std::exception_ptr failure;
  std::string error;
  if (is_main_process()) {
    try {
      std::filesystem::create_directories(folder);
      save_safetensors(model, folder / "model.safetensors");
    } catch (const std::exception& thrown) {
      failure = std::current_exception();
      error = thrown.what();
    }
  }
  try {
    libtorch::agree(
        {.name = "accelerator.save_model", .title = "Accelerator::save_model", .expected = {}},
        error, {});
  } catch (const UsageError&) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
}

void Accelerator::skip_batches(libtorch::LoaderProgress& progress, std::size_t batches) {
  if (batches == 0 || progress.skip_first(batches) || rank() != 0) return;
  TORCH_WARN("hvd: Accelerator::skip_first_batches: the loader '", progress.options().name,
             "' is at or after batch ", batches,
             " of its epoch already, as load_state() has left it; nothing is skipped, and the call "
             "can be left out");
}

void Accelerator::free_memory() {
  libtorch::AcceleratorCore& core = *core_;
  core.update_scale();
  core.registered.clear();
  core.schedulers.clear();
  core.optimizers.clear();
  core.loaders.clear();
  core.modules.clear();
  core.sync = true;
  core.passes = 0;
  if (core.device.is_cuda()) at::accelerator::emptyCache();
}

}  // namespace hvd
