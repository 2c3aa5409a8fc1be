#include "hvd/torch/checkpoint.h"

#include <string>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "hvd/error.h"

namespace hvd {
namespace {

libtorch::RankTalk talk_in(const ProcessSet& set, const std::string& who) {
  if (!set.included())
    throw UsageError(who + ": this rank is not in process set " + std::to_string(set.id()));
  return {set, who};
}

}  // namespace

std::uint64_t save_checkpoint(const std::filesystem::path& folder, const TrainingState& state,
                              const SaveCheckpointOptions& options) {
  const std::string who = "save_checkpoint";
  if (options.keep < 0) {
    throw UsageError(who + ": keep: expected a number of checkpoints, or 0 for all, got " +
                     std::to_string(options.keep));
  }
  libtorch::CheckpointWriter writer(folder, talk_in(options.process_set, who));
  const std::uint64_t step = writer.begin(state, options.step, options.replace_newer_than);
  libtorch::Snapshot snapshot;
  writer.take(state, step, snapshot, options.replace_newer_than);
  writer.write(snapshot, options.keep);
  return step;
}

std::optional<std::uint64_t> load_checkpoint(const std::filesystem::path& folder,
                                             const TrainingState& state,
                                             const LoadCheckpointOptions& options) {
  libtorch::CheckpointReader reader(folder, talk_in(options.process_set, "load_checkpoint"));
  return reader.load(state, options.step, options.allow_unused);
}

}  // namespace hvd
