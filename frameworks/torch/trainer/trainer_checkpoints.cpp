#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/checkpoint_folder.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"
#include "trainer/trainer_core.h"

// Checkpoints in OUTPUT_DIR/checkpoint-STEP, as Hugging Face's Trainer names them:
//
//     model.safetensors     the model, for Python
//     training_args.json    the arguments
//     trainer_state.json    TrainerState
//     step-000000000500/    the state of save_checkpoint(); complete when its manifest exists

namespace hvd {
namespace libtorch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "checkpoint-";
constexpr const char* kArguments = "training_args.json";
constexpr const char* kDescription = "trainer_state.json";
constexpr const char* kGlobalBatch = "global_batch";
/// The longest wait for the end of a former rank 0 that was cut off while it was writing.
constexpr std::chrono::seconds kLockTimeout(60);

fs::path folder_of(const fs::path& output_dir, std::int64_t step) {
  return output_dir / text(kPrefix, step);
}

/// The steps that have a folder, ascending. @throws CheckpointError
std::vector<std::int64_t> checkpoint_steps(const fs::path& output_dir, bool complete_only) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  fs::directory_iterator entries(output_dir, error);
  if (error == std::errc::no_such_file_or_directory) return steps;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const auto step = parse_number<std::int64_t>(std::string_view(name).substr(kPrefix.size()));
    if (!step || *step < 0) continue;
    if (complete_only && !CheckpointFolder(entries->path()).newest()) continue;
    steps.push_back(*step);
  }
  if (error) throw CheckpointError(text("cannot list ", output_dir, ": ", error.message()));
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// Whether a Trainer of hvd has written the folder, or was ended while it did so.
/// training_args.json is the first file of a checkpoint.
bool is_own(const fs::path& folder) {
  if (fs::exists(folder / kArguments)) return true;
  static const std::set<std::string> names{"model.safetensors", kDescription,
                                           GenerationRecord::kName, FolderLock::kName};
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!names.contains(name) && !name.starts_with("step-")) return false;
  }
  return true;
}

/// Whether the folder has a complete checkpoint that this elastic job has written.
bool is_of_this_job(const fs::path& folder) {
  return GenerationRecord(folder).names_job_of({.job = elastic_job_name()}) &&
         CheckpointFolder(folder).newest();
}

/// The Trainer removes old checkpoints, so it refuses folders that merely have the name of a
/// checkpoint.
/// @throws CheckpointError
void refuse_foreign(const fs::path& output_dir) {
  for (const std::int64_t step : checkpoint_steps(output_dir, /*complete_only=*/false)) {
    const fs::path folder = folder_of(output_dir, step);
    if (is_own(folder)) continue;
    throw CheckpointError(text("output_dir '", output_dir.native(), "' has ",
                               folder.filename().native(),
                               ", which is not a checkpoint of hvd; use another output_dir, or "
                               "move it away"));
  }
}

/// Removes the manifest first, so that a checkpoint that lacks a file never looks complete.
void remove_checkpoint(const fs::path& folder) {
  std::error_code error;
  for (const std::uint64_t step : CheckpointFolder(folder).steps())
    fs::remove(CheckpointFolder(folder).folder_of(step) / "manifest", error);
  if (!error) fs::remove_all(folder, error);
  if (error) TORCH_WARN("hvd: Trainer: cannot remove ", folder.native(), ": ", error.message());
}

void write_text(const fs::path& file, const std::string& contents) {
  std::ofstream stream(file, std::ios::binary);
  stream << contents << '\n' << std::flush;
  if (!stream) throw CheckpointError(text("cannot write ", file));
}

nlohmann::ordered_json read_json(const fs::path& file) {
  std::ifstream stream(file);
  return nlohmann::ordered_json::parse(stream, nullptr, /*allow_exceptions=*/false);
}

/// The samples of a batch on all ranks of the elastic job that has written the checkpoint; 0 if it
/// does not name them.
std::int64_t global_batch_of(const fs::path& checkpoint) {
  const auto description = read_json(checkpoint / kDescription);
  if (!description.is_object() || !description.contains(kGlobalBatch)) return 0;
  const auto& value = description[kGlobalBatch];
  return value.is_number_integer() ? std::max<std::int64_t>(value.get<std::int64_t>(), 0) : 0;
}

/// Describes the first argument that affects results and differs from that of the run that has
/// written the checkpoint. Empty if there is no difference.
std::string difference(const fs::path& checkpoint, const TrainingArguments& arguments) {
  const auto theirs = read_json(checkpoint / kArguments);
  if (!theirs.is_object()) return {};
  static const std::set<std::string> without_effect{"output_dir",       "dataloader_num_workers",
                                                    "disable_progress", "report_to",
                                                    "ddp_timeout",      "replay_every"};
  const auto ours = nlohmann::ordered_json::parse(arguments.to_json());
  for (const auto& [name, value] : ours.items()) {
    if (without_effect.contains(name) || !theirs.contains(name) || theirs[name] == value) continue;
    return text(name, " ", theirs[name].dump(), ", and this run has ", value.dump());
  }
  return {};
}

/// Calls the function on rank 0. If it throws, every rank throws the text of its exception.
/// Collective.
/// @throws UsageError on rank 0, MismatchError on the others
template <class Function>
void on_rank_0(const char* name, const char* title, const Function& function) {
  std::string error;
  if (rank() == 0) {
    try {
      function();
    } catch (const std::exception& caught) {
      error = text(title, ": ", caught.what());
    }
  }
  agree({.name = name, .title = title, .expected = {}}, error, {});
}

}  // namespace

TrainingState TrainerCore::training_state() {
  TrainingState all = accelerator->training_state();
  all.metric(*loss_, "trainer.loss").value("trainer.state", state).value("trainer.loop", loop_);
  for (std::size_t i = 0; i < callbacks.size(); ++i)
    callbacks[i]->add_state(all, text("trainer.callback_", i));
  return all;
}

void TrainerCore::save_checkpoint() {
  const std::int64_t step = state.global_step;
  const fs::path folder = folder_of(arguments.output_dir, step);
  if (state.best_global_step == step && state.best_metric)
    state.best_model_checkpoint = folder.string();
  std::optional<FolderLock> lock;  // of rank 0 in an elastic job
  bool complete = false;           // true in a step that is repeated after the save
  on_rank_0("trainer.save", "Trainer: save a checkpoint", [&] {
    if (elastic_job_) {
      lock.emplace(arguments.output_dir, kLockTimeout);
      GenerationRecord(arguments.output_dir).claim(present_generation());
      complete = is_of_this_job(folder);
    }
    if (complete) return;
    if (fs::exists(folder)) remove_checkpoint(folder);
    fs::create_directories(folder);
    write_description(folder);
  });
  if (elastic_job_) complete = broadcast_object(complete);
  if (!complete) write_state(folder);
  saved_step_ = step;
  on_rank_0("trainer.remove", "Trainer: remove old checkpoints", [&] {
    if (lock) GenerationRecord(arguments.output_dir).check(present_generation());
    remove_old(step);
  });
  call(&TrainerCallback::on_save);
}

void TrainerCore::write_state(const fs::path& folder) {
  const std::int64_t unlogged = state.global_step - loop_.logged_step;
  if (elastic_job_ && unlogged > 0 && rank() == 0) {
    loss_->update(elastic_.unlogged_loss / static_cast<double>(unlogged),
                  static_cast<double>(unlogged * size()));
  }
  hvd::save_checkpoint(folder, training_state(),
                       {.step = static_cast<std::uint64_t>(state.global_step)});
  if (elastic_job_) loss_->reset();
}

void TrainerCore::remove_old(std::int64_t step) const {
  const std::vector<std::int64_t> steps = checkpoint_steps(arguments.output_dir, false);
  const auto kept = static_cast<std::size_t>(arguments.save_total_limit.value_or(0));
  const auto end = std::upper_bound(steps.begin(), steps.end(), step);
  for (auto at = steps.begin(); at != steps.end(); ++at) {
    const fs::path folder = folder_of(arguments.output_dir, *at);
    const bool earlier_run = at >= end;
    const bool old = kept > 0 && static_cast<std::size_t>(end - at) > kept;
    if (earlier_run || (old && folder != state.best_model_checkpoint)) remove_checkpoint(folder);
  }
}

void TrainerCore::write_description(const fs::path& folder) const {
  nlohmann::ordered_json description{{"epoch", state.epoch},
                                     {"global_step", state.global_step},
                                     {"max_steps", state.max_steps},
                                     {"num_train_epochs", state.num_train_epochs},
                                     {"best_metric", nullptr},
                                     {"best_global_step", state.best_global_step},
                                     {"best_model_checkpoint", state.best_model_checkpoint},
                                     {"world_size", size()},
                                     {"log_history", state.log_history}};
  if (state.best_metric) description["best_metric"] = *state.best_metric;
  write_text(folder / kArguments, arguments.to_json());
  if (elastic_job_) description[kGlobalBatch] = elastic_.global_batch;
  write_text(folder / kDescription, description.dump(2));
  save_safetensors(*model, folder / "model.safetensors", {.durable = false});
}

std::string TrainerCore::choose_checkpoint(const ResumeFrom& from) const {
  const fs::path output_dir = arguments.output_dir;
  fs::create_directories(output_dir);
  refuse_foreign(output_dir);
  const auto newest = get_last_checkpoint(output_dir);
  if (elastic_job_) {  // all ranks were lost, if the job has a checkpoint
    const auto steps = checkpoint_steps(output_dir, /*complete_only=*/true);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      const fs::path folder = folder_of(output_dir, *step);
      if (is_of_this_job(folder)) return folder.string();
    }
  }
  if (from.folder()) {
    std::string chosen = from.folder()->string();
    if (CheckpointFolder(chosen).newest()) return chosen;
    throw CheckpointError(text("resume_from_checkpoint is '", chosen,
                               "', which is not a complete checkpoint; expected a folder such "
                               "as ",
                               output_dir.native(), "/checkpoint-500"));
  }
  if (from.newest()) {
    if (newest) return newest->string();
    throw CheckpointError(text("resume_from_checkpoint is true, and output_dir '",
                               output_dir.native(),
                               "' has no complete checkpoint; call "
                               "train() to start, or pass get_last_checkpoint(output_dir)"));
  }
  if (!newest) return {};
  if (elastic_job_) {
    throw CheckpointError(text("output_dir '", output_dir.native(), "' has ",
                               newest->filename().native(),
                               " of an earlier job, from which an elastic job would continue when "
                               "all its ranks are lost; call train(true) to continue it, or use "
                               "another output_dir"));
  }
  if (const std::string differs = difference(*newest, arguments); !differs.empty()) {
    throw CheckpointError(text("output_dir '", output_dir.native(),
                               "' has checkpoints of another run: that of ",
                               newest->filename().native(), " had ", differs,
                               "; call train(true) to continue it, or use another output_dir"));
  }
  return {};
}

void TrainerCore::resume(const ResumeFrom& from) {
  std::string chosen;
  on_rank_0("trainer.resume", "Trainer::train", [&] { chosen = choose_checkpoint(from); });
  load_chosen(broadcast_object(chosen));
}

void TrainerCore::load_chosen(const std::string& chosen) {
  if (!chosen.empty()) {
    // The checkpoint overwrites these fields, which belong to this rank and this run.
    const bool first = state.is_world_process_zero;
    const std::int64_t max_steps = state.max_steps, epochs = state.num_train_epochs;
    if (!load_checkpoint(chosen, training_state()))
      throw CheckpointError(text("Trainer::train: ", chosen, " is not a complete checkpoint"));
    state.is_world_process_zero = first;
    // output_dir may have been moved.
    const fs::path best = state.best_model_checkpoint;
    if (!best.empty() && !fs::exists(best))
      state.best_model_checkpoint = (fs::path(arguments.output_dir) / best.filename()).string();
    state.max_steps = max_steps;
    state.num_train_epochs = epochs;
    saved_step_ = state.global_step;
    const std::string differs = rank() == 0 ? difference(chosen, arguments) : std::string();
    if (!differs.empty()) {
      TORCH_WARN("hvd: Trainer: the run of ", chosen, " had ", differs,
                 "; this run continues with its own arguments");
    }
  }
  reopen_log();
}

/// Called on rank 0, before the job's first generation or after the loss of all ranks, or of a part
/// of the optimizer's state. An error here ends a job that has not begun.
void TrainerCore::start_elastic(const ResumeFrom& from) {
  try {
    elastic_.checkpoint = choose_checkpoint(from);
    if (!elastic_.checkpoint.empty()) {  // the ranks may have trained since
      elastic_.begun = elastic_.due = false;
      control_ = {};
    }
    if (!elastic_.checkpoint.empty() && is_of_this_job(elastic_.checkpoint))
      elastic_.global_batch = global_batch_of(elastic_.checkpoint);
  } catch (const CheckpointError& refused) {
    throw UsageError(text("Trainer::train: ", refused.what()));
  }
}

void TrainerCore::claim_output_dir() {
  on_rank_0("trainer.resume", "Trainer::train", [&] {
    const FolderLock lock(arguments.output_dir, kLockTimeout);
    GenerationRecord(arguments.output_dir).claim(present_generation());
  });
}

void TrainerCore::reopen_log() {
  on_rank_0("trainer.log", "Trainer::train", [&] { open_log(); });
}

/// The interrupted run may have logged more values at the checkpoint's step than the checkpoint
/// contains, such as the summary, so the values of that step are written again.
void TrainerCore::open_log() {
  const std::int64_t step = state.global_step;
  log_ = std::make_unique<TrainingLog>(arguments.output_dir, arguments.report_to, step);
  for (Values entry : state.log_history) {
    if (entry.at("step") != static_cast<double>(step)) continue;
    const double epoch = entry.at("epoch");
    entry.erase("step");
    entry.erase("epoch");
    log_->write(step, epoch, entry);
  }
}

void TrainerCore::load_best_model() {
  if (state.best_model_checkpoint.empty()) return;
  TrainingState only_model;
  only_model.model(model);
  if (load_checkpoint(state.best_model_checkpoint, only_model, {.allow_unused = true})) return;
  throw CheckpointError(
      text("Trainer::train: load_best_model_at_end: ", state.best_model_checkpoint,
           " is not a complete checkpoint any more; keep the folder until the "
           "training ends"));
}

}  // namespace libtorch

std::optional<std::filesystem::path> get_last_checkpoint(const std::filesystem::path& output_dir) {
  const auto steps = libtorch::checkpoint_steps(output_dir, /*complete_only=*/true);
  if (steps.empty()) return std::nullopt;
  return libtorch::folder_of(output_dir, steps.back());
}

}  // namespace hvd
