#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "hvd/process_set.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/training_state.h"

namespace hvd {

/// @addtogroup save
/// @{

/// How save_checkpoint() writes.
struct SaveCheckpointOptions {
  /// The number of the checkpoint, greater than those in the folder. Not set: one more than the
  /// newest, or 0.
  std::optional<std::uint64_t> step = {};
  /// How many of the newest checkpoints to keep. Older ones are removed when this one is complete.
  /// 0: all.
  int keep = 0;
  /// The step that was loaded, if it was not the newest. Complete checkpoints with greater numbers
  /// are removed when the new one is complete. One with the number of the new one is removed before
  /// that is written. Not set: a step that is not greater than the newest is refused.
  std::optional<std::uint64_t> replace_newer_than = {};
  /// The first rank also writes each model to NAME.safetensors in the checkpoint's folder, which
  /// Python's `safetensors` and load_safetensors() read. load_checkpoint() does not use these
  /// files, and the manifest does not list them.
  bool safetensors = false;
  ProcessSet process_set = {};
};

/// Which checkpoint load_checkpoint() reads, and how strictly.
struct LoadCheckpointOptions {
  /// The number of the checkpoint. Not set: the newest complete one.
  std::optional<std::uint64_t> step = {};
  /// Allows items in the checkpoint that the state does not name, for example the optimizer when
  /// only a model is loaded.
  bool allow_unused = false;
  ProcessSet process_set = {};
};

/// Writes a checkpoint to `folder`/step-... It is on the disk when the call returns. Each rank
/// writes one file; the checkpoint is complete when the first rank has written a manifest with the
/// names, sizes and checksums of all files. A kill or a crash at any moment therefore leaves
/// earlier checkpoints unchanged. Tensors are written directly from their memory. If the ranks'
/// parameters and optimizer states are equal, the ranks share the writing of these; otherwise the
/// first rank writes its own.
///
/// All ranks of the set must see the same folder. One process writes to a folder at a time;
/// meanwhile a file `lock` in it names that process. The lock ends with the process.
///
/// Collective over the set, and no rank of it may be in join(): if the ranks' data differ in
/// length, save when every rank has a batch, or after join(). Blocks. Other threads must not change
/// the objects that the state refers to.
/// @return the step
/// @throws CheckpointError on every rank when one rank cannot write, when another process is
/// writing to the folder, or when a module has no tensors; MismatchError when the ranks' items,
/// samplers' epochs or steps differ, and on the ranks that are not in join() when others are
/// (nothing is saved then); StalledError when some ranks do not make the call; and as every
/// collective
std::uint64_t save_checkpoint(const std::filesystem::path& folder, const TrainingState& state,
                              const SaveCheckpointOptions& options = {});

/// Loads a checkpoint, saved by any number of ranks, into the objects that the state names. Each
/// file is read by one rank, which sends it to the ranks that need it. If loading fails, no object
/// on any rank changes. Collective over the set; blocks.
/// @return the step; nullopt when the folder has no complete checkpoint and options.step is not set
/// @throws CheckpointError on every rank when a file is damaged, missing or of another version, and
/// when the checkpoint does not fit (a parameter that is missing, unexpected or of another shape;
/// another optimizer or data set); MismatchError as above; and as every collective
std::optional<std::uint64_t> load_checkpoint(const std::filesystem::path& folder,
                                             const TrainingState& state,
                                             const LoadCheckpointOptions& options = {});

/// @}

}  // namespace hvd
