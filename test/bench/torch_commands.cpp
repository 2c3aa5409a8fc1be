#include <memory>

#include "bench/commands.h"
#include "bench/step.h"

namespace hvd::bench {
namespace {

void declare_common(CLI::App& app, StepOptions& options) {
  declare_repetitions(app, options.repetitions, "Seconds per parameter set");
  declare_gloo(app, options.gloo_path);
  app.add_option("--lead", options.lead, "Untimed steps before each timed one")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option("--threads", options.threads,
                 "LibTorch's threads per rank; 0: cores divided by ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "Images per rank, where there is computation")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--contenders", options.contenders, "Who takes part")
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

}  // namespace

std::vector<Command> torch_commands(CLI::App& app) {
  return {step_command(app), train_command(app)};
}

}  // namespace hvd::bench
