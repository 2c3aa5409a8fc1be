#include "hvd/torch/training_arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "hvd/error.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::testing {
namespace {

using libtorch::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(const TrainingArguments& arguments) {
  try {
    arguments.check();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(TrainingArguments, TheDefaultsAreValid) { EXPECT_EQ(error_of({}), ""); }

struct BadArguments {
  TrainingArguments arguments;
  const char* expected;
};

TEST(TrainingArguments, ChecksNameTheArgumentTheValueAndTheRange) {
  const BadArguments cases[] = {
      {{.output_dir = ""}, "output_dir is \"\"; expected the name of a folder"},
      {{.per_device_train_batch_size = 0}, "per_device_train_batch_size is 0; expected at least 1"},
      {{.per_device_eval_batch_size = -2}, "per_device_eval_batch_size is -2"},
      {{.num_train_epochs = 0}, "num_train_epochs is 0.0; expected a finite number greater than 0"},
      {{.max_steps = 0}, "max_steps is 0; expected at least 1, or -1"},
      {{.learning_rate = -1}, "learning_rate is -1.0"},
      {{.learning_rate = std::numeric_limits<double>::quiet_NaN()}, "learning_rate is null"},
      {{.weight_decay = -0.1}, "weight_decay is -0.1"},
      {{.adam_beta1 = 1}, "adam_beta1 is 1.0; expected a number from 0 to less than 1"},
      {{.adam_beta2 = -0.5}, "adam_beta2 is -0.5"},
      {{.adam_epsilon = 0}, "adam_epsilon is 0.0; expected a number greater than 0"},
      {{.optim = OptimizerFactory()}, "optim is \"own\"; expected a function"},
      {{.warmup_steps = -1}, "warmup_steps is -1"},
      {{.warmup_ratio = 1.5}, "warmup_ratio is 1.5; expected a number from 0 to 1"},
      {{.warmup_steps = 10, .warmup_ratio = 0.5}, "warmup_steps is 10 and warmup_ratio is 0.5"},
      {{.gradient_accumulation_steps = 0}, "gradient_accumulation_steps is 0"},
      {{.max_grad_norm = -1}, "max_grad_norm is -1.0"},
      {{.fp16 = true, .bf16 = true}, "fp16 and bf16 are both set; set one of them"},
      {{.eval_steps = 0}, "eval_steps is 0; expected at least 1"},
      {{.save_steps = 0}, "save_steps is 0"},
      {{.save_total_limit = 0}, "save_total_limit is 0"},
      {{.logging_steps = 0}, "logging_steps is 0"},
      {{.load_best_model_at_end = true},
       "eval_strategy is \"no\"; expected steps or epoch; "
       "load_best_model_at_end needs a checkpoint"},
      {{.eval_strategy = Interval::kEpoch, .load_best_model_at_end = true},
       "save_strategy is \"steps\"; expected the eval_strategy, \"epoch\""},
      {{.eval_strategy = Interval::kSteps,
        .eval_steps = 3,
        .save_steps = 10,
        .load_best_model_at_end = true},
       "save_steps is 10; expected a multiple of eval_steps, 3"},
      {{.dataloader_num_workers = -1}, "dataloader_num_workers is -1"},
      {{.report_to = {"csv", "wandb"}},
       "report_to is [\"csv\",\"wandb\"]; expected names out of csv, json and tensorboard"},
      {{.ddp_timeout = std::chrono::seconds(0)}, "ddp_timeout is 0; expected at least 1"},
      {{.replay_every = -1}, "replay_every is -1"},
  };
  for (const BadArguments& bad : cases) {
    EXPECT_THAT(error_of(bad.arguments),
                HasSubstr(std::string("TrainingArguments: ") + bad.expected));
  }
}

TEST(TrainingArguments, TheMetricsNameDecidesWhetherGreaterIsBetter) {
  EXPECT_FALSE(TrainingArguments().greater_is_best());
  EXPECT_FALSE((TrainingArguments{.metric_for_best_model = "eval_loss"}).greater_is_best());
  EXPECT_TRUE((TrainingArguments{.metric_for_best_model = "accuracy"}).greater_is_best());
  EXPECT_FALSE((TrainingArguments{.metric_for_best_model = "accuracy", .greater_is_better = false})
                   .greater_is_best());
  EXPECT_EQ((TrainingArguments{.logging_steps = 7}).steps_between_evaluations(), 7);
}

/// The arguments after a command line. @throws CLI::ParseError
TrainingArguments parsed(std::vector<std::string> words) {
  TrainingArguments arguments;
  CLI::App app;
  arguments.add_options(app);
  std::reverse(words.begin(), words.end());
  app.parse(words);
  return arguments;
}

TEST(TrainingArguments, ComeFromACommandLine) {
  const TrainingArguments arguments = parsed({"--output_dir",
                                              "out",
                                              "--learning-rate",
                                              "1e-3",
                                              "--bf16",
                                              "--num_train_epochs=0.5",
                                              "--optim",
                                              "adamw_sharded",
                                              "--lr_scheduler_type",
                                              "cosine",
                                              "--eval_strategy",
                                              "steps",
                                              "--eval_steps",
                                              "20",
                                              "--greater_is_better",
                                              "false",
                                              "--report_to",
                                              "csv,json",
                                              "--ddp_timeout",
                                              "60",
                                              "--data_seed",
                                              "7"});
  EXPECT_EQ(arguments.output_dir, "out");
  EXPECT_EQ(arguments.learning_rate, 1e-3);
  EXPECT_TRUE(arguments.bf16);
  EXPECT_FALSE(arguments.fp16);
  EXPECT_EQ(arguments.num_train_epochs, 0.5);
  EXPECT_EQ(std::get<OptimizerType>(arguments.optim), OptimizerType::kAdamWSharded);
  EXPECT_EQ(arguments.lr_scheduler_type, SchedulerType::kCosine);
  EXPECT_EQ(arguments.eval_strategy, Interval::kSteps);
  EXPECT_EQ(arguments.eval_steps, 20);
  EXPECT_EQ(arguments.greater_is_better, false);
  EXPECT_THAT(arguments.report_to, ElementsAre("csv", "json"));
  EXPECT_EQ(arguments.ddp_timeout, std::chrono::seconds(60));
  EXPECT_EQ(arguments.data_seed, 7u);
}

TEST(TrainingArguments, ABadCommandLineIsRefused) {
  const auto message = [](const std::vector<std::string>& words) -> std::string {
    try {
      parsed(words);
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message({"--save_steps", "1e3"}), HasSubstr("got '1e3', expected a whole number"));
  EXPECT_THAT(message({"--optim", "lion"}),
              HasSubstr("--optim: got 'lion', expected one of adamw, adamw_sharded, sgd"));
  EXPECT_THAT(message({"--learning_rat", "1"}), HasSubstr("--learning_rat"));
}

class ArgumentsFile : public ::testing::Test {
 protected:
  TrainingArguments read(const std::string& content, const char* name = "arguments.yaml",
                         TrainingArguments arguments = {}) {
    std::ofstream(folder_.path() / name) << content;
    arguments.read_file(folder_.path() / name);
    return arguments;
  }
  std::string error(const std::string& content) {
    try {
      read(content);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }

  TemporaryFolder folder_;
};

TEST_F(ArgumentsFile, YamlChangesTheNamedArgumentsOnly) {
  const TrainingArguments arguments = read(
      "learning_rate: 1e-3\nfp16: yes\noptim: sgd\nreport_to: [csv, tensorboard]\n"
      "save_total_limit: 2\neval_steps: null\noutput_dir: \"a b\"\n",
      "arguments.yaml", {.max_steps = 9, .eval_steps = 5});
  EXPECT_EQ(arguments.learning_rate, 1e-3);
  EXPECT_TRUE(arguments.fp16);
  EXPECT_EQ(std::get<OptimizerType>(arguments.optim), OptimizerType::kSgd);
  EXPECT_THAT(arguments.report_to, ElementsAre("csv", "tensorboard"));
  EXPECT_EQ(arguments.save_total_limit, 2);
  EXPECT_EQ(arguments.eval_steps, std::nullopt);
  EXPECT_EQ(arguments.output_dir, "a b");
  EXPECT_EQ(arguments.max_steps, 9);
}

TEST_F(ArgumentsFile, ReadsTheJsonThatToJsonWrites) {
  const TrainingArguments written = {.output_dir = "x",
                                     .learning_rate = 0.25,
                                     .optim = OptimizerType::kSgd,
                                     .bf16 = true,
                                     .eval_strategy = Interval::kEpoch,
                                     .save_total_limit = 3,
                                     .report_to = {"json"}};
  EXPECT_EQ(read(written.to_json(), "arguments.json").to_json(), written.to_json());
  const auto object = nlohmann::json::parse(written.to_json());
  EXPECT_EQ(object["eval_strategy"], "epoch");
  EXPECT_EQ(object["eval_steps"], nullptr);
  EXPECT_EQ(object.size(), 36u);
}

TEST_F(ArgumentsFile, BadContentIsRefused) {
  EXPECT_THAT(error("learning_rate: fast\n"),
              HasSubstr("line 1: learning_rate is 'fast', expected a number"));
  EXPECT_THAT(error("seed: 1\nlr: 3\n"), HasSubstr("line 2: there is no argument 'lr'"));
  EXPECT_THAT(error("seed: [1, 2]\n"), HasSubstr("seed is '1', expected one value"));
  EXPECT_THAT(error("seed: {a: 1}\n"), HasSubstr("expected a value, not a map"));
  EXPECT_THAT(error("fp16:\n"), HasSubstr("fp16 is '', expected"));
  EXPECT_THAT(error("- seed\n"), HasSubstr("is not a YAML mapping"));
  EXPECT_THAT(error("seed: [1\n"), HasSubstr("cannot read"));
  TrainingArguments arguments;
  EXPECT_THROW(arguments.read_file(folder_.path() / "missing.yaml"), UsageError);
  std::ofstream(folder_.path() / "half.yaml") << "seed: 1\nlr: 3\n";
  EXPECT_THROW(arguments.read_file(folder_.path() / "half.yaml"), UsageError);
  EXPECT_EQ(arguments.seed, 42u) << "a file with an error has changed an argument";
}

}  // namespace
}  // namespace hvd::testing
