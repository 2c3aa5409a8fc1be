#include "hvd/torch/training_arguments.h"

#include <yaml-cpp/yaml.h>

#include <CLI/App.hpp>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd {
namespace {

/// Calls visit(name, value, help) for each argument. All code that treats all arguments in the same
/// way is derived from this list.
template <class Arguments, class Visit>
void for_each_argument(Arguments& a, const Visit& visit) {
  visit("output_dir", a.output_dir, "Folder of checkpoints and logs");
  visit("per_device_train_batch_size", a.per_device_train_batch_size, "Samples per batch and rank");
  visit("per_device_eval_batch_size", a.per_device_eval_batch_size,
        "Samples per batch and rank in evaluations");
  visit("num_train_epochs", a.num_train_epochs, "Passes over the training set");
  visit("max_steps", a.max_steps, "Optimizer steps in total; -1: num_train_epochs decides");
  visit("learning_rate", a.learning_rate, "Learning rate after the warm-up");
  visit("weight_decay", a.weight_decay, "Weight decay");
  visit("adam_beta1", a.adam_beta1, "Adam's beta1");
  visit("adam_beta2", a.adam_beta2, "Adam's beta2");
  visit("adam_epsilon", a.adam_epsilon, "Adam's epsilon");
  visit("optim", a.optim, "adamw, adamw_sharded or sgd");
  visit("lr_scheduler_type", a.lr_scheduler_type, "linear, cosine or constant");
  visit("warmup_steps", a.warmup_steps, "Steps in which the learning rate rises from 0");
  visit("warmup_ratio", a.warmup_ratio, "Length of the warm-up as a fraction of all steps");
  visit("gradient_accumulation_steps", a.gradient_accumulation_steps, "Batches per step");
  visit("max_grad_norm", a.max_grad_norm, "Largest total norm of the gradients; 0: any");
  visit("fp16", a.fp16, "Compute in float16");
  visit("bf16", a.bf16, "Compute in bfloat16");
  visit("eval_strategy", a.eval_strategy, "When to evaluate: no, steps or epoch");
  visit("eval_steps", a.eval_steps, "Steps between evaluations");
  visit("save_strategy", a.save_strategy, "When to save: no, steps or epoch");
  visit("save_steps", a.save_steps, "Steps between checkpoints");
  visit("save_total_limit", a.save_total_limit, "Checkpoints to keep");
  visit("logging_strategy", a.logging_strategy, "When to log: no, steps or epoch");
  visit("logging_steps", a.logging_steps, "Steps between lines of the log");
  visit("load_best_model_at_end", a.load_best_model_at_end, "Load the best checkpoint at the end");
  visit("metric_for_best_model", a.metric_for_best_model,
        "The value by which checkpoints are compared");
  visit("greater_is_better", a.greater_is_better, "Whether a greater value of it is better");
  visit("seed", a.seed, "Seed of the model's random numbers");
  visit("data_seed", a.data_seed, "Seed of the order of samples");
  visit("dataloader_num_workers", a.dataloader_num_workers, "Loading threads per rank");
  visit("dataloader_drop_last", a.dataloader_drop_last, "Leave out the last, smaller batches");
  visit("disable_progress", a.disable_progress, "Print no progress bar");
  visit("report_to", a.report_to, "Log to: csv, json, tensorboard");
  visit("ddp_timeout", a.ddp_timeout, "Seconds to wait for another rank");
  visit("replay_every", a.replay_every, "Steps between searches for corrupted gradients; 0: never");
}

template <class Enum>
using Names = std::array<std::pair<Enum, std::string_view>, 3>;

constexpr Names<Interval> names_of(Interval) {
  return {{{Interval::kNo, "no"}, {Interval::kSteps, "steps"}, {Interval::kEpoch, "epoch"}}};
}
constexpr Names<SchedulerType> names_of(SchedulerType) {
  return {{{SchedulerType::kLinear, "linear"},
           {SchedulerType::kCosine, "cosine"},
           {SchedulerType::kConstant, "constant"}}};
}
constexpr Names<OptimizerType> names_of(OptimizerType) {
  return {{{OptimizerType::kAdamW, "adamw"},
           {OptimizerType::kAdamWSharded, "adamw_sharded"},
           {OptimizerType::kSgd, "sgd"}}};
}

template <class Enum>
concept Enumeration = std::is_enum_v<Enum>;

// parse(words, value) sets the value from its text in a file or on the command line. It returns an
// empty string, or a description of the expected text if the text is invalid. Only report_to takes
// several words.

std::string parse(const std::vector<std::string>& words, std::vector<std::string>& value) {
  value = words;
  return {};
}
template <class Value>
  requires(!std::is_same_v<Value, std::vector<std::string>>)
std::string parse(const std::vector<std::string>& words, Value& value);

std::string parse_word(const std::string& word, std::string& value) {
  value = word;
  return {};
}
std::string parse_word(const std::string& word, bool& value) {
  for (const char* const yes : {"", "true", "True", "yes", "on", "1"}) {
    if (word == yes) return value = true, std::string();
  }
  for (const char* const no : {"false", "False", "no", "off", "0"}) {
    if (word == no) return value = false, std::string();
  }
  return "true or false";
}
template <class Number>
  requires std::is_arithmetic_v<Number>
std::string parse_word(const std::string& word, Number& value) {
  const std::optional<Number> number = parse_number<Number>(word);
  if (!number) return std::is_integral_v<Number> ? "a whole number" : "a number";
  value = *number;
  return {};
}
std::string parse_word(const std::string& word, std::chrono::seconds& value) {
  std::int64_t seconds = 0;
  const std::string expected = parse_word(word, seconds);
  if (expected.empty()) value = std::chrono::seconds(seconds);
  return expected;
}
template <Enumeration Enum>
std::string parse_word(const std::string& word, Enum& value) {
  std::string known;
  for (const auto& [each, name] : names_of(value)) {
    if (word == name) return value = each, std::string();
    known += text(known.empty() ? "" : ", ", name);
  }
  return text("one of ", known);
}
std::string parse_word(const std::string& word,
                       std::variant<OptimizerType, OptimizerFactory>& value) {
  OptimizerType type{};
  std::string expected = parse_word(word, type);
  if (expected.empty()) value = type;
  return expected;
}
template <class Value>
std::string parse_word(const std::string& word, std::optional<Value>& value) {
  Value present{};
  std::string expected = parse_word(word, present);
  if (expected.empty()) value = present;
  return expected;
}
template <class Value>
  requires(!std::is_same_v<Value, std::vector<std::string>>)
std::string parse(const std::vector<std::string>& words, Value& value) {
  if (words.size() != 1) return "one value";
  return parse_word(words.front(), value);
}

template <class Value>
nlohmann::ordered_json as_json(const Value& value) {
  return value;
}
nlohmann::ordered_json as_json(const std::chrono::seconds& value) { return value.count(); }
template <Enumeration Enum>
nlohmann::ordered_json as_json(const Enum& value) {
  for (const auto& [each, name] : names_of(value)) {
    if (each == value) return name;
  }
  return static_cast<int>(value);
}
nlohmann::ordered_json as_json(const std::variant<OptimizerType, OptimizerFactory>& value) {
  const OptimizerType* const type = std::get_if<OptimizerType>(&value);
  return type == nullptr ? nlohmann::ordered_json("own") : as_json(*type);
}
template <class Value>
nlohmann::ordered_json as_json(const std::optional<Value>& value) {
  return value ? as_json(*value) : nlohmann::ordered_json();
}

/// @throws UsageError unless `holds`
template <class Value>
void expect(bool holds, const char* name, const Value& value, const std::string& expected) {
  if (holds) return;
  throw UsageError(
      text("TrainingArguments: ", name, " is ", as_json(value).dump(), "; expected ", expected));
}

void check_ranges(const TrainingArguments& a) {
  const auto at_least = [](std::int64_t least, const char* name, std::int64_t value) {
    expect(value >= least, name, value, text("at least ", least));
  };
  const auto part = [](const char* name, double value) {
    expect(value >= 0 && value < 1, name, value, "a number from 0 to less than 1");
  };
  const auto not_negative = [](const char* name, double value) {
    expect(value >= 0 && std::isfinite(value), name, value, "a finite number, at least 0");
  };
  expect(!a.output_dir.empty(), "output_dir", a.output_dir, "the name of a folder");
  at_least(1, "per_device_train_batch_size", a.per_device_train_batch_size);
  at_least(1, "per_device_eval_batch_size", a.per_device_eval_batch_size);
  expect(a.num_train_epochs > 0 && std::isfinite(a.num_train_epochs), "num_train_epochs",
         a.num_train_epochs, "a finite number greater than 0");
  expect(a.max_steps == -1 || a.max_steps >= 1, "max_steps", a.max_steps, "at least 1, or -1");
  not_negative("learning_rate", a.learning_rate);
  not_negative("weight_decay", a.weight_decay);
  part("adam_beta1", a.adam_beta1);
  part("adam_beta2", a.adam_beta2);
  expect(a.adam_epsilon > 0, "adam_epsilon", a.adam_epsilon, "a number greater than 0");
  at_least(0, "warmup_steps", a.warmup_steps);
  expect(a.warmup_ratio >= 0 && a.warmup_ratio <= 1, "warmup_ratio", a.warmup_ratio,
         "a number from 0 to 1");
  at_least(1, "gradient_accumulation_steps", a.gradient_accumulation_steps);
  not_negative("max_grad_norm", a.max_grad_norm);
  at_least(1, "eval_steps", a.eval_steps.value_or(1));
  at_least(1, "save_steps", a.save_steps);
  at_least(1, "save_total_limit", a.save_total_limit.value_or(1));
  at_least(1, "logging_steps", a.logging_steps);
  at_least(0, "dataloader_num_workers", a.dataloader_num_workers);
  at_least(1, "ddp_timeout", a.ddp_timeout.count());
  at_least(0, "replay_every", a.replay_every);
  for (const std::string& place : a.report_to) {
    expect(place == "csv" || place == "json" || place == "tensorboard", "report_to", a.report_to,
           "names out of csv, json and tensorboard");
  }
  if (const auto* const factory = std::get_if<OptimizerFactory>(&a.optim)) {
    expect(*factory != nullptr, "optim", a.optim, "a function that makes an optimizer");
  }
}

void check_best_model(const TrainingArguments& a) {
  if (!a.load_best_model_at_end) return;
  const std::string remedy =
      "; load_best_model_at_end needs a checkpoint for each evaluation that may be the best";
  expect(a.eval_strategy != Interval::kNo, "eval_strategy", a.eval_strategy,
         "steps or epoch" + remedy);
  expect(a.save_strategy == a.eval_strategy, "save_strategy", a.save_strategy,
         text("the eval_strategy, ", as_json(a.eval_strategy).dump(), remedy));
  if (a.save_strategy == Interval::kSteps) {
    expect(a.save_steps % a.steps_between_evaluations() == 0, "save_steps", a.save_steps,
           text("a multiple of eval_steps, ", a.steps_between_evaluations(), remedy));
  }
}

}  // namespace

void TrainingArguments::add_options(CLI::App& app) {
  for_each_argument(*this, [&](const std::string& name, auto& value, const char* help) {
    std::string names = "--" + name;
    std::string dashes = name;
    for (char& c : dashes) c = c == '_' ? '-' : c;
    if (dashes != name) names += ",--" + dashes;
    using Value = std::remove_reference_t<decltype(value)>;
    constexpr bool is_list = std::is_same_v<Value, std::vector<std::string>>;
    CLI::Option* const option = app.add_option(
        names,
        [name, &value](const std::vector<std::string>& words) {
          const std::string expected = parse(words, value);
          if (expected.empty()) return true;
          throw CLI::ValidationError("--" + name, text("got '", words.empty() ? "" : words.front(),
                                                       "', expected ", expected));
        },
        help);
    if (is_list) option->delimiter(',')->expected(1, -1);
    if (std::is_same_v<Value, bool> || std::is_same_v<Value, std::optional<bool>>) {
      option->expected(0, 1);
    } else {
      option->default_str(as_json(std::as_const(value)).dump());
    }
  });
}

void TrainingArguments::read_file(const std::filesystem::path& file) {
  YAML::Node root;
  try {
    root = YAML::LoadFile(file);
  } catch (const YAML::Exception& error) {
    throw UsageError(text("TrainingArguments: cannot read ", file.native(), ": ", error.what()));
  }
  if (!root.IsMap()) {
    throw UsageError(text("TrainingArguments: ", file.native(),
                          " is not a YAML mapping; expected lines such as 'learning_rate: 0.001'"));
  }
  TrainingArguments changed = *this;
  for (const auto& line : root) {
    const std::string key = line.first.Scalar();
    const YAML::Node& node = line.second;
    bool known = false;
    for_each_argument(changed, [&](const char* name, auto& value, const char*) {
      if (key != name) return;
      known = true;
      std::vector<std::string> words;
      if (node.IsScalar()) words.push_back(node.Scalar());
      for (std::size_t i = 0; node.IsSequence() && i < node.size(); ++i) {
        words.push_back(node[i].Scalar());
      }
      std::string expected = node.IsMap() ? "a value, not a map" : "";
      if constexpr (requires { value.reset(); }) {
        if (node.IsNull()) return value.reset();
      }
      if (expected.empty()) expected = parse(words, value);
      if (expected.empty() && node.IsScalar() && node.Scalar().empty() &&
          !std::is_same_v<decltype(value), std::string&>) {
        expected = "a value";
      }
      if (!expected.empty()) {
        throw UsageError(text("TrainingArguments: ", file.native(), ", line ", node.Mark().line + 1,
                              ": ", key, " is '", words.empty() ? "" : words.front(),
                              "', expected ", expected));
      }
    });
    if (!known) {
      throw UsageError(text("TrainingArguments: ", file.native(), ", line ",
                            line.first.Mark().line + 1, ": there is no argument '", key,
                            "'; hvd/torch/training_arguments.h lists the names"));
    }
  }
  *this = std::move(changed);
}

std::string TrainingArguments::to_json() const {
  nlohmann::ordered_json object;
  for_each_argument(*this, [&](const char* name, const auto& value, const char*) {
    object[name] = as_json(value);
  });
  return object.dump(2);
}

void TrainingArguments::check() const {
  check_ranges(*this);
  if (fp16 && bf16) {
    throw UsageError("TrainingArguments: fp16 and bf16 are both set; set one of them");
  }
  if (warmup_steps > 0 && warmup_ratio > 0) {
    throw UsageError(text("TrainingArguments: warmup_steps is ", warmup_steps,
                          " and warmup_ratio is ", warmup_ratio, "; set one of them"));
  }
  check_best_model(*this);
}

bool TrainingArguments::greater_is_best() const {
  return greater_is_better.value_or(!metric_for_best_model.empty() &&
                                    !metric_for_best_model.ends_with("loss"));
}

}  // namespace hvd
