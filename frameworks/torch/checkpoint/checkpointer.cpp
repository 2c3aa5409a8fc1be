#include "hvd/torch/checkpointer.h"

#include <exception>
#include <future>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/termination_notice.h"
#include "hvd/error.h"
#include "hvd/torch/operations.h"

namespace hvd {

using libtorch::CheckpointWriter;
using libtorch::RankTalk;
using libtorch::Snapshot;

struct Checkpointer::Impl {
  const std::filesystem::path folder;
  const TrainingState state;
  const CheckpointerOptions options;
  const RankTalk talk;
  CheckpointWriter writer;
  std::optional<libtorch::TerminationNotice> notice;
  std::optional<std::uint64_t> saved;  ///< the last step that was handed over
  Snapshot snapshot;                   ///< in the background: its memory, from one to the next
  std::future<void> writing;           ///< last: it waits for the thread, which uses the others
};

namespace {

void check(const CheckpointerOptions& options) {
  if (options.keep < 0) {
    throw UsageError("Checkpointer: keep: expected a number of checkpoints, or 0 for all, got " +
                     std::to_string(options.keep));
  }
  if (!options.process_set.included()) {
    throw UsageError("Checkpointer: this rank is not in process set " +
                     std::to_string(options.process_set.id()));
  }
}

}  // namespace

Checkpointer::Checkpointer(std::filesystem::path folder, TrainingState state,
                           CheckpointerOptions options) {
  check(options);
  // The folder is in the names of operations: programs have one Checkpointer for each.
  RankTalk talk(options.process_set, "Checkpointer of " + folder.string());
  CheckpointWriter writer(folder, talk);
  impl_.reset(new Impl{.folder = std::move(folder),
                       .state = std::move(state),
                       .options = std::move(options),
                       .talk = std::move(talk),
                       .writer = std::move(writer),
                       .notice = {},
                       .saved = {},
                       .snapshot = {},
                       .writing = {}});
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
}

std::optional<std::uint64_t> Checkpointer::load(std::optional<std::uint64_t> step) {
  wait();
  impl_->snapshot = {};  // what is read takes room, too
  libtorch::CheckpointReader reader(impl_->folder, impl_->talk);
  return reader.load(impl_->state, step, /*allow_unused=*/false);
}

std::uint64_t Checkpointer::save(std::optional<std::uint64_t> step) {
  wait();
  Impl& impl = *impl_;
  const std::uint64_t agreed = impl.writer.begin(impl.state, step);
  impl.saved.reset();
  if (impl.options.background) {
    impl.writer.take(impl.state, agreed, impl.snapshot);
    impl.writing = std::async(std::launch::async,
                              [&impl] { impl.writer.write(impl.snapshot, impl.options.keep); });
  } else {
    Snapshot snapshot;
    impl.writer.take(impl.state, agreed, snapshot);
    impl.writer.write(snapshot, impl.options.keep);
  }
  impl.saved = agreed;
  return agreed;
}

bool Checkpointer::should_stop(std::uint64_t step) {
  Impl& impl = *impl_;
  if (!impl.notice) {
    throw UsageError(
        "Checkpointer::should_stop: expected a Checkpointer with save_on_sigterm, so that SIGTERM "
        "is noticed");
  }
  const int own = libtorch::TerminationNotice::given() ? 1 : 0;
  const torch::Tensor any =
      allreduce(torch::tensor(own), {.name = "Checkpointer of " + impl.folder.string() + ".stop",
                                     .op = ReduceOp::kMax,
                                     .process_set = impl.options.process_set});
  if (any.item<int>() == 0) return false;
  try {
    wait();
  } catch (const CheckpointError& error) {
    // On every rank alike. What is about to be written takes its place.
    TORCH_WARN("hvd: a checkpoint was not written: ", error.what());
  }
  if (impl.saved != step) {
    save(step);
    wait();
  }
  return true;
}

}  // namespace hvd
