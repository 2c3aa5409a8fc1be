#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "hvd/process_set.h"
#include "hvd/torch/checkpoint.h"

namespace hvd {

/// @addtogroup save
/// @{

/// How a Checkpointer saves.
struct CheckpointerOptions {
  /// How many of the newest checkpoints to keep; 0: all.
  int keep = 0;
  /// save() returns when the state has been copied; another thread writes it to the disk.
  bool background = false;
  /// SIGTERM does not end the process; should_stop() saves a checkpoint and returns true.
  bool save_on_sigterm = false;
  /// After load(k) of a checkpoint that is not the newest, checkpoints later than k are replaced:
  /// the first save() removes them once its own is complete. Otherwise a step that is not greater
  /// than the newest is refused.
  bool replace_newer = false;
  /// See SaveCheckpointOptions::safetensors. In the background the first rank copies each model
  /// once more.
  bool safetensors = false;
  ProcessSet process_set = {};
};

/// Saves and loads the checkpoints of one training program in one folder, also in the background
/// and on SIGTERM. Every rank of the set makes one object for the folder, with equal arguments. All
/// functions except wait() and the destructor are collective over the set.
/// Not thread-safe. No rank of the set may be in join() when save() is called (MismatchError), but
/// a save in the background may still be under way: join() waits until it is written.
class Checkpointer {
 public:
  /// @throws UsageError for options out of range, or when this rank is not in the process set;
  /// NotInitializedError before init().
  Checkpointer(std::filesystem::path folder, TrainingState state, CheckpointerOptions options = {});
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// Waits for a save in the background; its error becomes a warning. Must run before shutdown(),
  /// otherwise that checkpoint is lost.
  ~Checkpointer();

  /// Like load_checkpoint(), after wait(). @return the step, nullopt if the folder has no complete
  /// checkpoint
  std::optional<std::uint64_t> load(std::optional<std::uint64_t> step = std::nullopt);

  /// Like save_checkpoint(). In the background it waits for the previous save, copies the bytes
  /// that this rank writes to the host's memory, and returns. The memory of the copy is kept for
  /// the next one, until load() or the destructor, since fresh memory costs more than the copy.
  /// @return the step
  /// @throws as save_checkpoint(); and the error of the previous save in the background, in which
  /// case nothing is saved
  std::uint64_t save(std::optional<std::uint64_t> step = std::nullopt);

  /// Waits for the save in the background, if there is one. Not collective. @throws the error of
  /// that save, the same on every rank
  void wait();

  /// Returns whether any rank has received SIGTERM, and if so makes sure that a checkpoint of
  /// `step` is on the disk. Call it once per step, on all ranks, when the state is that of `step`.
  /// Each call costs an allreduce of two numbers. While some ranks are in join(), the function
  /// returns false and remembers the signal for the next call in which all ranks take part. So if
  /// the ranks' data differ in length, call it after join(state) too.
  /// @throws UsageError without save_on_sigterm; otherwise as save()
  bool should_stop(std::uint64_t step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// @}

}  // namespace hvd
