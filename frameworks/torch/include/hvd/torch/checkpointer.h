#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "hvd/process_set.h"
#include "hvd/torch/checkpoint.h"

namespace hvd {

struct CheckpointerOptions {
  /// How many of the newest stay; 0: all.
  int keep = 0;
  /// save() returns when the state has been copied; another thread brings it to the disk.
  bool background = false;
  /// SIGTERM does not end the process: should_stop() tells of it, once a checkpoint is on disk.
  bool save_on_sigterm = false;
  /// After load(k) of a checkpoint that is not the newest, checkpoints later than k are replaced:
  /// the first save() removes them once its own is complete. Otherwise a step that is not greater
  /// than the newest is refused.
  bool replace_newer = false;
  ProcessSet process_set = {};
};

/// Checkpoints of one training program in one folder: save_checkpoint() and load_checkpoint() for
/// the whole of it, in the background and at its end. All functions but the destructor are
/// collective over the set, and every rank makes one with equal arguments. One per folder; one
/// thread at a time. No rank of the set may be in join() when save() is called (MismatchError), but
/// a save in the background may still be under way: join() waits until it is written.
class Checkpointer {
 public:
  /// @throws UsageError for options out of range, or when this rank is not in the process set;
  /// NotInitializedError before init().
  Checkpointer(std::filesystem::path folder, TrainingState state, CheckpointerOptions options = {});
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// Waits for what is being written; an error is a warning. Before shutdown(), or what is being
  /// written is lost.
  ~Checkpointer();

  /// As load_checkpoint(), after wait(). @return the step, nullopt if there is none
  std::optional<std::uint64_t> load(std::optional<std::uint64_t> step = std::nullopt);

  /// As save_checkpoint(). In the background: waits for the one before, copies the state and
  /// returns; training may go on at once. The copy takes as much of the host's memory as this rank
  /// writes (of a model its first rank only), which stays for the next one until load() or the
  /// destructor, since memory that is new costs more than the copy itself.
  /// @return the step
  /// @throws as save_checkpoint(), also what went wrong in the background since the last call:
  /// nothing is saved then
  std::uint64_t save(std::optional<std::uint64_t> step = std::nullopt);

  /// Returns when nothing is being written any more. Not collective. @throws what went wrong in the
  /// background since the last call, on every rank the same
  void wait();

  /// Whether any rank has been sent SIGTERM. If so, a checkpoint of `step` is on disk when this
  /// returns, unless save() has written it already. Call it once per step, on all ranks, when the
  /// state is that of `step`; it costs an allreduce of two numbers. While some ranks are in join()
  /// it returns false and remembers the signal for the next call in which all ranks take part, so a
  /// loop over data of different length also calls it behind join(state).
  /// @throws UsageError without save_on_sigterm; otherwise as save()
  bool should_stop(std::uint64_t step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hvd
