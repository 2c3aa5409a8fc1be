#include "hvd/torch/checkpointer.h"

#include <exception>
#include <future>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/termination_notice.h"
#include "hvd/background.h"
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
  std::optional<std::uint64_t> saved;   ///< the last step that was handed over
  std::optional<std::uint64_t> loaded;  ///< what is newer is replaced by the next save
  Snapshot snapshot;                    ///< in the background: its memory, from one to the next
  std::future<void> writing;            ///< last: it waits for the thread, which uses the others

  void write_in_background();
};

/// Between the ranks' background threads. join() lets it end first, as a rank that has joined takes
/// no part in exchanges.
void Checkpointer::Impl::write_in_background() {
  auto exchange = std::make_shared<BackgroundExchange>();
  writing = std::async(std::launch::async, [this, exchange = std::move(exchange)]() mutable {
    const BackgroundThread here;
    const std::shared_ptr<BackgroundExchange> until_written = std::move(exchange);
    writer.write(snapshot, options.keep);
  });
}

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
                       .loaded = {},
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
  impl_->loaded.reset();  // what was newer has been replaced
}

std::optional<std::uint64_t> Checkpointer::load(std::optional<std::uint64_t> step) {
  wait();
  impl_->snapshot = {};  // what is read takes room, too
  libtorch::CheckpointReader reader(impl_->folder, impl_->talk);
  const auto found = reader.load(impl_->state, step, /*allow_unused=*/false);
  if (impl_->options.replace_newer && found) impl_->loaded = found;
  return found;
}

std::uint64_t Checkpointer::save(std::optional<std::uint64_t> step) {
  wait();
  Impl& impl = *impl_;
  const std::uint64_t agreed = impl.writer.begin(impl.state, step, impl.loaded);
  impl.saved.reset();
  if (impl.options.background) {
    impl.writer.take(impl.state, agreed, impl.snapshot, impl.loaded);
    impl.write_in_background();
  } else {
    Snapshot snapshot;
    impl.writer.take(impl.state, agreed, snapshot, impl.loaded);
    impl.writer.write(snapshot, impl.options.keep);
    impl.loaded.reset();
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
  const torch::Tensor counts = allreduce(
      torch::tensor({own, 1}), {.name = "Checkpointer of " + impl.folder.string() + ".stop",
                                .op = ReduceOp::kSum,
                                .process_set = impl.options.process_set});
  if (counts[0].item<std::int64_t>() == 0) return false;
  // A rank in join() would not hear of it. The signal is still there at the next call.
  if (counts[1].item<std::int64_t>() < impl.options.process_set.size()) return false;
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
