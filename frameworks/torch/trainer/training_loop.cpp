#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/text.h"
#include "checkpoint/termination_notice.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/random_streams.h"
#include "operations/agreement.h"
#include "trainer/learning_rate_schedule.h"
#include "trainer/trainer_core.h"

namespace hvd::libtorch {
namespace {

/// "60,000".
std::string with_commas(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

/// As Python prints a dict: {'loss': 0.5, 'epoch': 1}. The training loss comes first and the epoch
/// last.
std::string dict_of(const Values& values) {
  std::string line = "{";
  const auto add = [&line](const std::string& name, double value) {
    char number[32];
    std::snprintf(number, sizeof number, "%.6g", value);
    line += text(line.size() > 1 ? ", '" : "'", name, "': ", number);
  };
  const auto is_last = [](const std::string& name) { return name == "epoch"; };
  if (const auto loss = values.find("loss"); loss != values.end()) add("loss", loss->second);
  for (const auto& [name, value] : values)
    if (name != "loss" && !is_last(name)) add(name, value);
  for (const auto& [name, value] : values)
    if (is_last(name)) add(name, value);
  return line + '}';
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const torch::nn::Module& model,
                                                        const TrainingArguments& arguments) {
  std::vector<torch::Tensor> all, decayed, others;
  for (const torch::Tensor& parameter : model.parameters()) {
    if (!parameter.requires_grad()) continue;
    all.push_back(parameter);
    (parameter.dim() < 2 ? others : decayed).push_back(parameter);
  }
  if (all.empty()) {
    throw UsageError(
        "Trainer: the model has no parameter that requires grad; expected at least one");
  }
  if (const auto* const factory = std::get_if<OptimizerFactory>(&arguments.optim)) {
    auto optimizer = (*factory)(all, arguments);
    if (optimizer) return optimizer;
    throw UsageError("Trainer: the function in optim has returned null; expected an optimizer");
  }
  const bool sgd = std::get<OptimizerType>(arguments.optim) == OptimizerType::kSgd;
  const auto options = [&](double decay) -> std::unique_ptr<torch::optim::OptimizerOptions> {
    if (sgd) {
      return std::make_unique<torch::optim::SGDOptions>(
          torch::optim::SGDOptions(arguments.learning_rate).weight_decay(decay));
    }
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(arguments.learning_rate)
            .betas({arguments.adam_beta1, arguments.adam_beta2})
            .eps(arguments.adam_epsilon)
            .weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!decayed.empty()) groups.emplace_back(std::move(decayed), options(arguments.weight_decay));
  if (!others.empty()) groups.emplace_back(std::move(others), options(0));
  if (sgd) return std::make_unique<torch::optim::SGD>(groups, arguments.learning_rate);
  return std::make_unique<torch::optim::AdamW>(groups);
}

void check_loss(const torch::Tensor& loss) {
  if (loss.defined() && loss.numel() == 1) return;
  throw UsageError(text("Trainer: compute_loss() has returned ",
                        loss.defined() ? text("a tensor of shape ", c10::str(loss.sizes()))
                                       : std::string("an undefined tensor"),
                        "; expected the mean loss of the batch, of shape []"));
}

}  // namespace

TrainOutput TrainerCore::train(const ResumeFrom& resume_from_checkpoint) {
  if (elastic_job_) return train_elastic(resume_from_checkpoint);
  std::optional<TerminationNotice> notice(std::in_place);
  prepare_training();
  open_training();
  schedule_->set_first_rates(*inner_optimizer_);
  resume(resume_from_checkpoint);
  print_header();
  control_.should_training_stop = loop_.stop_requested || state.global_step >= state.max_steps;
  TrainOutput output = train_loop();
  const bool late = TerminationNotice::given();
  notice.reset();
  if (late) ::raise(SIGTERM);  // the signal arrived after the last step and has its usual effect
  return output;
}

TrainOutput TrainerCore::train_loop() {
  progress_.emplace(state.max_steps, ProgressBarOptions{.unit = "samples",
                                                        .units_per_step = static_cast<double>(
                                                            samples_per_batch() *
                                                            arguments.gradient_accumulation_steps),
                                                        .initial = state.global_step,
                                                        .enabled = !arguments.disable_progress});
  first_step_ = state.global_step;
  call(&TrainerCallback::on_train_begin);
  exchange_requests();
  const Stopwatch watch;
  model->train();
  if (elastic_.due) finish_step();
  while (loop_.in_epoch || !control_.should_training_stop) run_epoch();
  return finish_training(watch);
}

void TrainerCore::run_epoch() {
  const std::size_t epoch = train_set_->epoch();
  loop_.in_epoch = true;
  control_.should_epoch_stop = std::exchange(loop_.epoch_stop_requested, false);
  call(&TrainerCallback::on_epoch_begin);
  exchange_requests();
  const auto stops = [this] {
    return batches_in_step_ == 0 && (control_.should_training_stop || control_.should_epoch_stop);
  };
  while (!stops()) {
    const std::size_t used = train_set_->samples_used();
    const void* const batch = train_set_->next();
    if (batch == nullptr) break;
    batch_samples_ = static_cast<std::int64_t>(train_set_->samples_used() - used);
    samples_trained_ += static_cast<std::size_t>(batch_samples_);
    train_on(batch);
  }
  const bool ended = control_.should_epoch_stop || train_set_->batches_left() == 0;
  if (ended && train_set_->epoch() == epoch) train_set_->end_epoch();
  loop_.in_epoch = false;
  control_.should_log = arguments.logging_strategy == Interval::kEpoch;
  control_.should_evaluate = arguments.eval_strategy == Interval::kEpoch;
  control_.should_save = arguments.save_strategy == Interval::kEpoch;
  call(&TrainerCallback::on_epoch_end);
  log_evaluate_save();
}

void TrainerCore::train_on(const void* batch) {
  const std::int64_t accumulated = arguments.gradient_accumulation_steps;
  if (batches_in_step_ == 0) {
    const auto left = static_cast<std::int64_t>(train_set_->batches_left()) + 1;
    batches_of_step_ = std::min(accumulated, left);
    call(&TrainerCallback::on_step_begin);
  }
  const Accumulation pass = accelerator->accumulate();
  const torch::Tensor loss = compute_gradients(batch);
  loss_->update(loss.detach(), elastic_job_ ? static_cast<double>(own_samples())
                                            : 1.0 / static_cast<double>(batches_of_step_));
  if (++batches_in_step_ < batches_of_step_) return call(&TrainerCallback::on_substep_end);
  batches_in_step_ = 0;
  if (elastic_job_) add_step_loss();
  step_optimizer();
}

torch::Tensor TrainerCore::compute_gradients(const void* batch) {
  const auto checked = [this](const auto& compute) {
    const Autocast autocast = accelerator->autocast();
    torch::Tensor loss = compute();
    check_loss(loss);
    return loss;
  };
  const auto loss_of_batch = [&] { return checked([&] { return trainer.loss_of(batch); }); };
  const auto backward = [this](const torch::Tensor& loss) {
    // The ranks' shares of a batch differ in an elastic job.
    if (elastic_job_) return accelerator->backward(loss, {.weight = own_samples()});
    // backward() divides by gradient_accumulation_steps; the last step of an epoch may have fewer.
    const double share = static_cast<double>(arguments.gradient_accumulation_steps) /
                         static_cast<double>(batches_of_step_);
    accelerator->backward(share == 1 ? loss : loss * share);
  };
  const std::int64_t step = state.global_step + 1;
  if (batches_in_step_ + 1 < batches_of_step_ || !replay_->is_due(step)) {
    torch::Tensor loss = loss_of_batch();
    backward(loss);
    return loss;
  }
  // The optimizer reduces the gradients when it steps.
  const Accumulation local = accelerator->no_sync();
  return replay_->run(step, {.loss = loss_of_batch,
                             .backward = backward,
                             .encode = [&] { return trainer.encode(batch); },
                             .loss_of_encoded =
                                 [&](std::string_view bytes) {
                                   return checked([&] { return trainer.loss_of_encoded(bytes); });
                                 }});
}

void TrainerCore::step_optimizer() {
  if (arguments.max_grad_norm > 0)
    loop_.grad_norm = accelerator->clip_grad_norm_(arguments.max_grad_norm);
  loop_.learning_rate = inner_optimizer_->param_groups().front().options().get_lr();
  optimizer_->step();
  scheduler_->step();
  optimizer_->zero_grad();
  progress_->update(++state.global_step);
  update_epoch();
  const auto due = [this](Interval interval, std::int64_t steps) {
    return interval == Interval::kSteps && state.global_step % steps == 0;
  };
  const bool last = state.global_step >= state.max_steps;
  control_.should_log = due(arguments.logging_strategy, arguments.logging_steps);
  control_.should_evaluate = due(arguments.eval_strategy, arguments.steps_between_evaluations());
  control_.should_save = due(arguments.save_strategy, last ? 1 : arguments.save_steps);
  if (last) control_.should_training_stop = true;
  call(&TrainerCallback::on_step_end);
  log_evaluate_save();
}

void TrainerCore::log_evaluate_save() {
  // A rank may be lost in the collectives that follow, so the step is committed together with the
  // work that is due.
  elastic_.due = true;
  commit();
  finish_step();
}

void TrainerCore::finish_step() {
  exchange_requests();
  exchange_termination();
  const bool works = control_.should_log || control_.should_evaluate || control_.should_save;
  if (control_.should_log) log_training_loss();
  if (control_.should_evaluate) evaluate_and_compare();
  if (control_.should_log || control_.should_evaluate) exchange_requests();
  loop_.stop_requested = control_.should_training_stop && state.global_step < state.max_steps;
  loop_.epoch_stop_requested = control_.should_epoch_stop && loop_.in_epoch;
  if (control_.should_save) {
    save_checkpoint();
    exchange_requests();
  }
  control_.should_log = control_.should_evaluate = control_.should_save = false;
  elastic_.due = false;
  if (works) commit();
  stop_if_terminated();
}

void TrainerCore::prepare_training() {
  if (!train_set_) {
    throw UsageError("Trainer::train: there is no training set; pass one to the constructor");
  }
  if (arguments.replay_every > 0) trainer.check_sendable();
  accelerator->free_memory();
  schedule_.reset();
  state = {.is_world_process_zero = !elastic_job_ && rank() == 0};
  control_ = {};
  loop_ = {};
  elastic_ = {};
  train_open_ = false;
  batches_in_step_ = 0;
  saved_step_ = -1;
  samples_trained_ = 0;
  termination_ = {};
  terminated_ = false;
  log_.reset();
  log_error_.clear();
  progress_.reset();

  if (!elastic_job_) RandomStreams(arguments.seed).seed_default();
  inner_optimizer_ = make_optimizer(*model, arguments);
  schedule_ =
      std::make_unique<LearningRateSchedule>(arguments.lr_scheduler_type, *inner_optimizer_);
  auto [module, optimizer, scheduler] = accelerator->prepare(model, *inner_optimizer_, *schedule_);
  optimizer_ = &optimizer;
  scheduler_ = &scheduler;
  loss_.emplace("trainer.loss");
  replay_.emplace(model, arguments.replay_every);
  optimizer_->zero_grad();
}

void TrainerCore::open_training() {
  const std::int64_t batches = batches_per_epoch();
  const std::int64_t in_step = arguments.gradient_accumulation_steps;
  const std::int64_t steps_per_epoch = (batches + in_step - 1) / in_step;
  const auto steps = static_cast<double>(steps_per_epoch);
  state.max_steps = arguments.max_steps > 0
                        ? arguments.max_steps
                        : static_cast<std::int64_t>(std::ceil(arguments.num_train_epochs * steps));
  state.num_train_epochs = (state.max_steps + steps_per_epoch - 1) / steps_per_epoch;
  schedule_->set_steps(warmup_steps_of(arguments, state.max_steps), state.max_steps);
  if (!train_open_ && elastic_job_ && elastic_.global_batch < size()) {
    throw UsageError(text("Trainer: a batch has ", elastic_.global_batch,
                          " samples on all ranks, as fixed when the training began, and the job "
                          "has now ",
                          size(),
                          " ranks; expected at least one sample for each rank: "
                          "start it with --max-np ",
                          elastic_.global_batch, " at most"));
  }
  if (!train_open_) train_set_->open(*accelerator, train_options(), /*train=*/true);
  train_open_ = true;
}

void TrainerCore::print_header() const {
  if (rank() != 0) return;
  std::int64_t trainable = 0;
  for (const torch::Tensor& parameter : model->parameters())
    if (parameter.requires_grad()) trainable += parameter.numel();
  std::string lines =
      text("***** Running training *****\n  Num examples = ",
           with_commas(static_cast<std::int64_t>(train_set_->samples().value_or(0))),
           "\n  Num Epochs = ", with_commas(state.num_train_epochs),
           "\n  Instantaneous batch size per device = ",
           with_commas(arguments.per_device_train_batch_size),
           "\n  Total train batch size (w. parallel, distributed & accumulation) = ",
           with_commas(samples_per_batch() * arguments.gradient_accumulation_steps),
           "\n  Gradient Accumulation steps = ", with_commas(arguments.gradient_accumulation_steps),
           "\n  Total optimization steps = ", with_commas(state.max_steps),
           "\n  Number of trainable parameters = ", with_commas(trainable), "\n");
  if (state.global_step > 0) {
    lines += text("  Continuing from global step ", with_commas(state.global_step), ", epoch ",
                  state.epoch, "\n");
  }
  std::fwrite(lines.data(), 1, lines.size(), stdout);
  std::fflush(stdout);
}

void TrainerCore::update_epoch() {
  const auto left = static_cast<double>(train_set_->batches_left());
  state.epoch = static_cast<double>(train_set_->epoch()) + 1 -
                left / static_cast<double>(batches_per_epoch());
}

double TrainerCore::fold_loss() {
  const std::int64_t steps = state.global_step - loop_.logged_step;
  if (steps == 0) return 0;
  const double mean = elastic_job_
                          ? std::exchange(elastic_.unlogged_loss, 0) / static_cast<double>(steps)
                          : loss_->compute();
  loss_->reset();
  loop_.loss_sum += mean * static_cast<double>(steps);
  loop_.logged_step = state.global_step;
  return mean;
}

void TrainerCore::log_training_loss() {
  if (state.global_step == loop_.logged_step) return;
  Values values{{"loss", fold_loss()}, {"learning_rate", loop_.learning_rate}};
  if (arguments.max_grad_norm > 0) values["grad_norm"] = loop_.grad_norm;
  log(values);
  raise_log_error();
}

void TrainerCore::raise_log_error() {
  const std::string error = std::exchange(log_error_, {});
  agree({.name = "trainer.log_error", .title = "Trainer", .expected = {}}, error, {});
}

void TrainerCore::log(const Values& values) {
  Values entry = values;
  entry["epoch"] = state.epoch;
  if (rank() == 0) {
    const std::string line = dict_of(entry);
    if (progress_ && !arguments.disable_progress) {
      progress_->print(line);
    } else {
      std::fprintf(stdout, "%s\n", line.c_str());
      std::fflush(stdout);
    }
  }
  try {
    if (log_) log_->write(state.global_step, state.epoch, values);
  } catch (const Error& error) {
    log_error_ = error.what();
    log_.reset();
  }
  entry["step"] = static_cast<double>(state.global_step);
  state.log_history.push_back(entry);
  call(&TrainerCallback::on_log, entry);
}

TrainOutput TrainerCore::finish_training(const Stopwatch& watch) {
  if (termination_.valid()) terminated_ = termination_.wait().item<std::int32_t>() != 0;
  termination_ = {};
  stop_if_terminated();
  fold_loss();
  const double seconds = watch.seconds();
  TrainOutput output;
  output.global_step = state.global_step;
  output.training_loss =
      loop_.loss_sum / static_cast<double>(std::max<std::int64_t>(state.global_step, 1));
  if (arguments.load_best_model_at_end) load_best_model();
  const auto steps = static_cast<double>(state.global_step - first_step_);
  Values metrics{{"train_runtime", seconds},
                 {"train_samples_per_second", static_cast<double>(samples_trained_) / seconds},
                 {"train_steps_per_second", steps / seconds},
                 {"train_loss", output.training_loss}};
  log(metrics);
  raise_log_error();
  metrics["epoch"] = state.epoch;
  output.metrics = std::move(metrics);
  progress_->finish();
  progress_.reset();
  call(&TrainerCallback::on_train_end);
  return output;
}

void TrainerCore::exchange_requests() {
  if (callbacks.empty() || size() == 1) return;
  bool* const requests[] = {&control_.should_training_stop, &control_.should_epoch_stop,
                            &control_.should_save, &control_.should_evaluate, &control_.should_log};
  torch::Tensor own = torch::empty({5}, torch::kInt32);
  for (std::int64_t i = 0; i < 5; ++i) own[i] = *requests[i] ? 1 : 0;
  const torch::Tensor all = allreduce(own, {.name = "trainer.requests", .op = ReduceOp::kMax});
  for (std::int64_t i = 0; i < 5; ++i) *requests[i] = all[i].item<std::int32_t>() != 0;
}

/// With several ranks the exchange of one step is read in the next step, so that no rank waits for
/// it.
void TrainerCore::exchange_termination() {
  if (elastic_job_) return;
  const bool given = TerminationNotice::given();
  if (size() == 1) {
    terminated_ = given;
    return;
  }
  if (termination_.valid()) terminated_ = termination_.wait().item<std::int32_t>() != 0;
  termination_ = {};
  if (terminated_) return;
  termination_ = allreduce_async(torch::tensor(given ? 1 : 0, torch::kInt32),
                                 {.name = "trainer.termination", .op = ReduceOp::kMax});
}

void TrainerCore::stop_if_terminated() {
  if (!terminated_) return;
  if (saved_step_ != state.global_step) save_checkpoint();
  if (rank() == 0) {
    std::fprintf(stderr,
                 "Trainer: SIGTERM was received, and %s/checkpoint-%lld is saved; the exit code is "
                 "%d. Call train(true) to continue.\n",
                 arguments.output_dir.c_str(), static_cast<long long>(state.global_step),
                 kTerminatedExitCode);
  }
  log_.reset();
  progress_.reset();
  train_set_.reset();  // ends the threads that load batches
  eval_set_.reset();
  shutdown();
  std::exit(kTerminatedExitCode);  // NOLINT(concurrency-mt-unsafe)
}

}  // namespace hvd::libtorch
