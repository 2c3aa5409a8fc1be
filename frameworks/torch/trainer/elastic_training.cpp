#include <string>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "trainer/trainer_core.h"

namespace hvd::libtorch {

/// The total number of samples per batch over all ranks stays the same, so that steps, epochs and
/// the schedule do not depend on the number of ranks.
TrainOutput TrainerCore::train_elastic(const ResumeFrom& from) {
  prepare_training();
  TrainOutput output;
  accelerator->run(
      elastic_state(), [&] { output = enter_generation(); }, {.seed = arguments.seed},
      [&] { start_elastic(from); });
  return output;
}

TrainingState TrainerCore::elastic_state() {
  TrainingState all = accelerator->core_->prepared_state();
  all.value("trainer.state", state)
      .value("trainer.loop", loop_)
      .value("trainer.elastic", elastic_)
      .value_per_rank("trainer.control", control_);
  for (std::size_t i = 0; i < callbacks.size(); ++i)
    callbacks[i]->add_state(all, text("trainer.callback_", i));
  return all;
}

TrainOutput TrainerCore::enter_generation() {
  state.is_world_process_zero = rank() == 0;
  if (const std::string error = error_for_ranks(); !error.empty()) throw UsageError(error);
  batches_in_step_ = 0;
  loss_->reset();
  log_.reset();
  log_error_.clear();
  progress_.reset();
  if (elastic_.global_batch == 0) {
    elastic_.global_batch = samples_per_batch();
    commit();  // the training set is opened with this number, and no other
  }
  open_training();
  if (elastic_.begun) {
    const auto batch = static_cast<std::uint64_t>(elastic_.global_batch);
    train_set_->go_to(*accelerator, elastic_.epoch, (elastic_.used + batch - 1) / batch);
    reopen_log();
    return train_loop();
  }
  schedule_->set_first_rates(*inner_optimizer_);
  train_set_->go_to(*accelerator, 0, 0);  // a rank that was interrupted is within an epoch
  claim_output_dir();
  load_chosen(elastic_.checkpoint);
  if (const std::int64_t steps = state.global_step - loop_.logged_step; steps > 0)
    elastic_.unlogged_loss = loss_->compute() * static_cast<double>(steps);
  loss_->reset();
  control_.should_training_stop = loop_.stop_requested || state.global_step >= state.max_steps;
  print_header();
  elastic_.begun = true;
  commit();
  return train_loop();
}

void TrainerCore::commit() {
  if (!elastic_job_) return;
  if (train_open_) {
    elastic_.epoch = train_set_->epoch();
    elastic_.used = train_set_->samples_used();
  }
  state.is_world_process_zero = false;  // the other values are equal on all ranks
  accelerator->commit();
  state.is_world_process_zero = rank() == 0;
}

std::int64_t TrainerCore::own_samples() const {
  return (batch_samples_ + size() - 1 - rank()) / size();
}

void TrainerCore::add_step_loss() {
  elastic_.unlogged_loss += loss_->compute();
  loss_->reset();
}

}  // namespace hvd::libtorch
