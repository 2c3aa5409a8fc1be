#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "hvd/process_set.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/training_state.h"

namespace hvd {

struct SaveCheckpointOptions {
  /// Under which number; greater than those that are there. Not set: one more than the newest, or
  /// 0.
  std::optional<std::uint64_t> step = {};
  /// How many of the newest stay; older ones are removed once this one is complete. 0: all.
  int keep = 0;
  /// The step that was loaded, where it was not the newest: complete checkpoints with greater
  /// numbers are replaced. They are removed when this one is complete, the one of the same step
  /// before it is written. Not set: a step that is not greater than the newest is refused.
  std::optional<std::uint64_t> replace_newer_than = {};
  ProcessSet process_set = {};
};

struct LoadCheckpointOptions {
  /// Which one. Not set: the newest that is complete.
  std::optional<std::uint64_t> step = {};
  /// The checkpoint may hold things that the state does not name, the optimizer when a model is
  /// loaded to be evaluated.
  bool allow_unused = false;
  ProcessSet process_set = {};
};

/// Writes a checkpoint into `folder`/step-..., on disk when this returns. Each rank writes a file
/// of its own; they count once the first rank has written a manifest that names them all, with
/// sizes and checksums. So a kill or a crash at any moment leaves what was there before. All ranks
/// of the set must see the same folder, which one process of all jobs writes to at a time: while it
/// does, a file `lock` there names it, and the lock ends with the process. Collective over the set,
/// and no rank of it may be in join(): in a loop over data of different length save when every rank
/// has a batch, or behind join(). Blocks. Not thread-safe with respect to what the state refers to.
/// @return the step
/// @throws CheckpointError on every rank, when any rank cannot do its part, another process is
/// writing to the folder, or a module has nothing to save; MismatchError when the ranks' states
/// name different things, their samplers' epochs differ or the steps do, and on the ranks that are
/// not in join() when others are (nothing is saved then); StalledError when ranks do not call it;
/// and as every collective.
std::uint64_t save_checkpoint(const std::filesystem::path& folder, const TrainingState& state,
                              const SaveCheckpointOptions& options = {});

/// Loads a checkpoint, saved by any number of ranks, into everything that the state names. The
/// first rank reads what is the same on all and broadcasts it. Either all is loaded, on all ranks,
/// or nothing has changed. Collective over the set; blocks.
/// @return its step; nullopt, and nothing has changed, when the folder has no complete checkpoint
/// and no step was asked for
/// @throws CheckpointError on every rank when a file is damaged, missing or of another version, or
/// when what was saved does not fit (a parameter that is missing, unexpected or of another shape;
/// another optimizer or data set); MismatchError as above; and as every collective.
std::optional<std::uint64_t> load_checkpoint(const std::filesystem::path& folder,
                                             const TrainingState& state,
                                             const LoadCheckpointOptions& options = {});

}  // namespace hvd
