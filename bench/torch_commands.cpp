#include <CLI/CLI.hpp>
#include <memory>

#include "bench/commands.h"

namespace hvd::bench {
namespace {

void declare_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "LibTorch's threads per rank; 0: cores divided by ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

void declare_common(CLI::App& app, StepOptions& options) {
  declare_repetitions(app, options.repetitions, "Seconds per parameter set");
  declare_gloo(app, options.gloo_path);
  app.add_option("--lead", options.lead, "Untimed steps before each timed one")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  declare_threads(app, options.threads);
  app.add_option("--batch-size", options.batch_size, "Images per rank, where there is computation")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--contenders", options.contenders, "Contenders that take part")
      ->delimiter(',')
      ->check(CLI::IsMember(step_contender_names()));
}

Command step_command(CLI::App& parent) {
  CLI::App* const app =
      parent.add_subcommand("step", "A training step: backward, exchange, SGD, beside its peers");
  const auto options = std::make_shared<StepOptions>();
  declare_common(*app, *options);
  app->add_option("--sets", options->sets, "Parameter sets")
      ->delimiter(',')
      ->check(CLI::IsMember(parameter_set_names()));
  app->add_flag("--compute", options->compute, "With the network's own computation (--sets mnist)");
  return {app, [options](const Session& session, std::ostream& out) {
            return run_step(session, *options, out);
          }};
}

Command train_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "train", "The step of the mnist example: one process alone, side by side, and with hvd");
  const auto options = std::make_shared<StepOptions>();
  options->sets = {"mnist"};
  options->contenders = {"one", "alone", "hvd"};
  options->compute = true;
  options->update = Update::kAdamW;
  declare_common(*app, *options);
  return {app, [options](const Session& session, std::ostream& out) {
            return run_step(session, *options, out);
          }};
}

Command layers_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "layers", "SyncBatchNorm2d in ResNet-50's sizes, and what it exchanges");
  const auto options = std::make_shared<LayersOptions>();
  declare_threads(*app, options->threads);
  declare_repetitions(*app, options->repetitions, "Seconds per size");
  app->add_option("--batch-size", options->batch_size, "Images per rank")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  return {app, [options](const Session& session, std::ostream& out) {
            return run_layers(session, *options, out);
          }};
}

Command checkpoint_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "checkpoint",
      "The time that saving adds to the steps, in the foreground and in the background");
  const auto options = std::make_shared<CheckpointOptions>();
  declare_threads(*app, options->threads);
  app->add_option("--megabytes", options->megabytes, "State")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app->add_option("--rounds", options->rounds, "Checkpoints of each kind")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app->add_option("--step-ms", options->step_ms, "Computation per step")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app->add_option("--folder", options->folder, "Where to write; nothing stays there")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  return {app, [options](const Session& session, std::ostream& out) {
            return run_checkpoint(session, *options, out);
          }};
}

Command safetensors_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "safetensors", "Writing and reading a file of safetensors, beside a copy of the file");
  const auto options = std::make_shared<SafetensorsOptions>();
  declare_threads(*app, options->threads);
  app->add_option("--megabytes", options->megabytes, "The file")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app->add_option("--rounds", options->rounds, "Timed files of each kind")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app->add_option("--folder", options->folder, "Where to write; nothing stays there")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  return {app, [options](const Session& session, std::ostream& out) {
            return run_safetensors(session, *options, out);
          }};
}

Command sharded_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "sharded", "A training step with Adam: state on every rank, and shared out");
  const auto options = std::make_shared<ShardedOptions>();
  declare_threads(*app, options->threads);
  declare_repetitions(*app, options->repetitions, "Seconds");
  app->add_option("--set", options->set, "Parameter set")
      ->check(CLI::IsMember(parameter_set_names()))
      ->capture_default_str();
  app->add_option("--lead", options->lead, "Untimed steps before each timed one")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  return {app, [options](const Session& session, std::ostream& out) {
            return run_sharded(session, *options, out);
          }};
}

Command levels_command(CLI::App& parent) {
  CLI::App* const app = parent.add_subcommand(
      "levels", "Steps of Accelerator, of Trainer and with weights, beside a hand-written loop");
  const auto options = std::make_shared<LevelsOptions>();
  declare_threads(*app, options->threads);
  declare_repetitions(*app, options->repetitions, "Seconds per parameter set");
  app->add_option("--sets", options->sets, "Parameter sets; mnist computes")
      ->delimiter(',')
      ->check(CLI::IsMember(parameter_set_names()));
  app->add_option("--contenders", options->contenders, "Contenders, beside the loop")
      ->delimiter(',')
      ->check(CLI::IsMember(level_contender_names()));
  app->add_option("--batch-size", options->batch_size, "Images per rank")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--clip", options->max_norm, "Largest norm of the gradients; 0: any")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--steps", options->steps, "Timed steps of a run")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app->add_option("--lead", options->lead, "Untimed steps at the beginning of a run")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  return {app, [options](const Session& session, std::ostream& out) {
            return run_levels(session, *options, out);
          }};
}

}  // namespace

std::vector<Command> torch_commands(CLI::App& app) {
  return {step_command(app),       train_command(app),       layers_command(app),
          checkpoint_command(app), safetensors_command(app), sharded_command(app),
          levels_command(app)};
}

}  // namespace hvd::bench
