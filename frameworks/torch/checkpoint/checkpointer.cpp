#include "hvd/torch/checkpointer.h"

#include <exception>
#include <future>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/termination_notice.h"
#include "hvd/background.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/torch/checkpoint.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"

namespace hvd {
namespace {

libtorch::CheckpointVote vote_in(const ProcessSet& set, const std::string& who) {
  libtorch::require_member(who, set);
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
  libtorch::CheckpointWriter writer(folder, vote_in(options.process_set, who), options.safetensors);
  libtorch::Snapshot snapshot;
  writer.take_snapshot(state, options.step, options.replace_newer_than, /*copy=*/false, snapshot);
  writer.write(snapshot, options.keep);
  return snapshot.step;
}

std::optional<std::uint64_t> load_checkpoint(const std::filesystem::path& folder,
                                             const TrainingState& state,
                                             const LoadCheckpointOptions& options) {
  libtorch::CheckpointReader reader(folder, vote_in(options.process_set, "load_checkpoint"));
  return reader.load(state, options.step, options.allow_unused);
}

using libtorch::CheckpointVote;
using libtorch::CheckpointWriter;
using libtorch::Snapshot;

struct Checkpointer::Impl {
  const std::filesystem::path folder;
  const TrainingState state;
  const CheckpointerOptions options;
  const CheckpointVote vote;
  CheckpointWriter writer;
  std::optional<libtorch::TerminationNotice> notice;
  std::optional<std::uint64_t> saved;   ///< the last saved step
  std::optional<std::uint64_t> loaded;  ///< the loaded step; the next save replaces newer ones
  std::shared_ptr<const void> ends;     ///< calls end_generation()
  Snapshot snapshot;                    ///< of a background save; the next one reuses its memory
  std::future<void>
      writing;  ///< last, since its destructor waits for the thread, which uses the other members

  void write_in_background();
  void end_generation();
  bool is_saved(std::uint64_t step) const;
};

/// The background threads of the ranks communicate. join() waits for their exchange to end, since a
/// rank that has joined takes no part in operations.
void Checkpointer::Impl::write_in_background() {
  auto exchange = std::make_shared<BackgroundExchange>();
  writing = std::async(std::launch::async, [this, exchange = std::move(exchange)]() mutable {
    const BackgroundThread here;
    const std::shared_ptr<BackgroundExchange> until_written = std::move(exchange);
    writer.write(snapshot, options.keep);
  });
}

/// Waits for the save in the background, because ranks that join the job do not take part in it.
/// Ranks that join also have not loaded or saved the checkpoints of this object, so afterwards the
/// first rank, which is the longest-serving one, decides.
void Checkpointer::Impl::end_generation() {
  saved.reset();
  if (!writing.valid()) return;
  try {
    writing.get();
    loaded.reset();
  } catch (const std::exception& error) {
    TORCH_WARN("hvd: a checkpoint was not written: ", error.what());
  }
}

/// Whether the step was saved last. In an elastic job an earlier generation may have saved it,
/// unless the checkpoints after the loaded one are still those of an earlier run. Collective in an
/// elastic job.
bool Checkpointer::Impl::is_saved(std::uint64_t step) const {
  if (saved == step) return true;
  if (elastic::generation() == 0) return false;
  const auto newest = vote.run("newest", [&] {
    const bool earlier_run = loaded && *loaded < step;
    return libtorch::encode_object(
        vote.first() && !earlier_run ? libtorch::CheckpointFolder(folder).newest() : std::nullopt);
  });
  return libtorch::decode_object<std::optional<std::uint64_t>>(newest.front()) == step;
}

namespace {

void check(const CheckpointerOptions& options) {
  if (options.keep < 0) {
    throw UsageError("Checkpointer: keep: expected a number of checkpoints, or 0 for all, got " +
                     std::to_string(options.keep));
  }
  libtorch::require_member("Checkpointer", options.process_set);
}

}  // namespace

Checkpointer::Checkpointer(std::filesystem::path folder, TrainingState state,
                           CheckpointerOptions options) {
  check(options);
  // Operations have the folder in their names, since a program has one Checkpointer per folder.
  CheckpointVote vote(options.process_set, "Checkpointer of " + folder.string());
  CheckpointWriter writer(folder, vote, options.safetensors);
  impl_.reset(new Impl{.folder = std::move(folder),
                       .state = std::move(state),
                       .options = std::move(options),
                       .vote = std::move(vote),
                       .writer = std::move(writer),
                       .notice = {},
                       .saved = {},
                       .loaded = {},
                       .ends = {},
                       .snapshot = {},
                       .writing = {}});
  impl_->ends = elastic::at_generation_end([impl = impl_.get()] { impl->end_generation(); });
  if (impl_->options.save_on_sigterm) impl_->notice.emplace();
}

Checkpointer::~Checkpointer() {
  try {
    wait();
  } catch (const std::exception& error) {
    TORCH_WARN("hvd: a checkpoint was not written: ", error.what());
  }
}

void Checkpointer::wait() {
  if (!impl_->writing.valid()) return;
  try {
    impl_->writing.get();
  } catch (...) {
    impl_->saved.reset();
    throw;
  }
  impl_->loaded.reset();  // newer checkpoints have been replaced
}

std::optional<std::uint64_t> Checkpointer::load(std::optional<std::uint64_t> step) {
  wait();
  impl_->snapshot.free_memory();  // frees memory for the bytes that are read
  libtorch::CheckpointReader reader(impl_->folder, impl_->vote);
  const auto found = reader.load(impl_->state, step, /*allow_unused=*/false);
  if (impl_->options.replace_newer && found) impl_->loaded = found;
  return found;
}

std::uint64_t Checkpointer::save(std::optional<std::uint64_t> step) {
  wait();
  Impl& impl = *impl_;
  if (impl.options.background) {
    impl.writer.take_snapshot(impl.state, step, impl.loaded, /*copy=*/true, impl.snapshot);
    impl.saved.reset();
    impl.write_in_background();
    impl.saved = impl.snapshot.step;
  } else {
    Snapshot snapshot;
    impl.writer.take_snapshot(impl.state, step, impl.loaded, /*copy=*/false, snapshot);
    impl.saved.reset();
    impl.writer.write(snapshot, impl.options.keep);
    impl.loaded.reset();
    impl.saved = snapshot.step;
  }
  return *impl.saved;
}

bool Checkpointer::should_stop(std::uint64_t step) {
  Impl& impl = *impl_;
  if (!impl.notice) {
    throw UsageError(
        "Checkpointer::should_stop: expected a Checkpointer with save_on_sigterm, so that SIGTERM "
        "is noticed");
  }
  const int own = libtorch::TerminationNotice::given() ? 1 : 0;
  const torch::Tensor counts = allreduce(
      torch::tensor({own, 1}), {.name = "Checkpointer of " + impl.folder.string() + ".stop",
                                .op = ReduceOp::kSum,
                                .process_set = impl.options.process_set});
  if (counts[0].item<std::int64_t>() == 0) return false;
  // A rank in join() takes no part. The signal is remembered for the next call.
  if (counts[1].item<std::int64_t>() < impl.options.process_set.size()) return false;
  try {
    wait();
  } catch (const CheckpointError& error) {
    // The error is the same on every rank. The next checkpoint replaces the failed one.
    TORCH_WARN("hvd: a checkpoint was not written: ", error.what());
  }
  if (!impl.is_saved(step)) {
    save(step);
    wait();
  }
  return true;
}

}  // namespace hvd
