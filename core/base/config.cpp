#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd {
namespace {

// The largest number of seconds. In nanoseconds it fits into 63 bits.
constexpr double kMaxSeconds = 1e9;

struct SetVariable {
  const Variable& variable;
  std::string full_name;
  std::string value;
};

std::string lower(std::string_view value) {
  std::string result(value);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::optional<SetVariable> find(const Variable& variable) {
  for (const char* const prefix : {"HVD_", "HOROVOD_"}) {
    if (variable.use != VariableUse::kRuntime && prefix[1] == 'O') continue;
    std::string full = text(prefix, variable.name);
    const char* const value = std::getenv(full.c_str());
    if (value != nullptr && *value != '\0') return SetVariable{variable, std::move(full), value};
  }
  return std::nullopt;
}

const Variable& known(std::string_view name) {
  const auto found = std::ranges::find(variables(), name, &Variable::name);
  if (found == variables().end())
    throw Error(
        text("HVD_", name, " is not in the table of variables (core/base/config_table.cpp)"));
  return *found;
}

[[noreturn]] void reject(const SetVariable& setting) {
  throw UsageError(text("environment variable ", setting.full_name, ": expected ",
                        expected_values(setting.variable, '\''), ", got '", setting.value, "'"));
}

std::int64_t whole(const SetVariable& setting) {
  const auto value = parse_number<std::int64_t>(setting.value);
  if (!value || *value < setting.variable.lowest || *value > setting.variable.highest)
    reject(setting);
  return *value;
}

std::chrono::milliseconds seconds(const SetVariable& setting) {
  const auto value = parse_number<double>(setting.value);
  if (!value || !std::isfinite(*value) || *value < 0 || *value > kMaxSeconds) reject(setting);
  const std::chrono::milliseconds result(std::llround(*value * 1000));
  if (result.count() < setting.variable.lowest) reject(setting);
  return result;
}

bool on_or_off(const SetVariable& setting) {
  const std::string value = lower(setting.value);
  if (value == "1" || value == "yes" || value == "true" || value == "on") return true;
  if (value == "0" || value == "no" || value == "false" || value == "off") return false;
  reject(setting);
}

std::string choice(const SetVariable& setting) {
  std::string value = lower(setting.value);
  if (!value.empty() && value == setting.variable.removed_choice) {
    throw UsageError(text("environment variable ", setting.full_name, ": the value '",
                          setting.value, "' was removed; ", setting.variable.instead));
  }
  for (const std::string_view one : split_text(setting.variable.choices, '|')) {
    if (value == one) return value;
  }
  reject(setting);
}

void check(const SetVariable& setting) {
  const VariableKind kind = setting.variable.kind;
  if (kind == VariableKind::kWhole) whole(setting);
  if (kind == VariableKind::kSeconds) seconds(setting);
  if (kind == VariableKind::kSwitch) on_or_off(setting);
  if (kind == VariableKind::kChoice) choice(setting);
}

/// The Levenshtein distance: insertions, deletions and substitutions between the two texts.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, diagonal + 1, substituted});
    }
  }
  return row.back();
}

bool is_known(std::string_view name) {
  // hvdrun sets the first kind for its supervisors and ranks. Only tests read the second.
  if (name.starts_with("LAUNCHER_") || name.starts_with("TEST_")) return true;
  return std::ranges::find(variables(), name, &Variable::name) != variables().end();
}

/// Returns the most similar known name. Empty if no known name is similar.
std::string_view nearest(std::string_view name) {
  std::string_view best;
  std::size_t fewest = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const Variable& variable : variables()) {
    if (variable.use == VariableUse::kTest) continue;
    const std::size_t changes = distance(name, variable.name);
    if (changes >= fewest) continue;
    fewest = changes;
    best = variable.name;
  }
  return best;
}

/// Variables of earlier versions. Setting one of them is an error, and `meaning` describes what to
/// do instead.
constexpr Variable kRemovedVariables[] = {
    {.name = "CUDA_AWARE_MPI",
     .meaning = "unset it: GPU tensors that NCCL does not take go through the host's memory"},
};

template <class Result, class Parse>
std::optional<Result> read(std::string_view name, const Parse& parse_setting) {
  const auto setting = find(known(name));
  if (!setting) return std::nullopt;
  return parse_setting(*setting);
}

}  // namespace

std::optional<std::string> env_string(std::string_view name) {
  return read<std::string>(name, [](const SetVariable& setting) { return setting.value; });
}
std::optional<std::int64_t> env_int(std::string_view name) {
  return read<std::int64_t>(name, whole);
}
std::optional<std::chrono::milliseconds> env_seconds(std::string_view name) {
  return read<std::chrono::milliseconds>(name, seconds);
}
std::optional<bool> env_switch(std::string_view name) { return read<bool>(name, on_or_off); }
std::optional<std::string> env_choice(std::string_view name) {
  return read<std::string>(name, choice);
}

void check_environment() {
  for (const Variable& removed : kRemovedVariables) {
    if (const auto setting = find(removed))
      throw UsageError(text("environment variable ", setting->full_name,
                            ": expected it unset, because it was removed, got '", setting->value,
                            "'; ", removed.meaning));
  }
  for (const Variable& variable : variables()) {
    if (variable.use != VariableUse::kRuntime) continue;
    if (const auto setting = find(variable)) check(*setting);
  }
}

std::vector<std::string> variables_in_force(VariableUse use) {
  std::vector<std::string> found;
  for (const Variable& variable : variables()) {
    if (variable.use != use) continue;
    const auto setting = find(variable);
    if (setting && lower(setting->value) != variable.fallback)
      found.push_back(setting->full_name + "=" + setting->value);
  }
  return found;
}

std::vector<std::string> unknown_variables() {
  std::vector<std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    constexpr std::string_view kPrefix = "HVD_";
    if (!line.starts_with(kPrefix)) continue;
    const std::string_view name = line.substr(kPrefix.size(), line.find('=') - kPrefix.size());
    if (is_known(name)) continue;
    const std::string_view like = nearest(name);
    found.push_back(text("HVD_", name, " is no variable of hvd and has no effect",
                         like.empty() ? "" : text("; did you mean HVD_", like, "?")));
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string expected_values(const Variable& variable, char quote) {
  switch (variable.kind) {
    case VariableKind::kWhole:
      return text("a whole number from ", variable.lowest, " to ", variable.highest);
    case VariableKind::kSeconds:
      return variable.lowest > 0 ? "seconds, more than 0, to 1000000000"
                                 : "seconds, from 0 to 1000000000";
    case VariableKind::kSwitch:
      return "1, yes, true or on, or 0, no, false or off";
    case VariableKind::kChoice: {
      std::vector<std::string> choices;
      for (const std::string_view one : split_text(variable.choices, '|'))
        choices.push_back(text(quote, one, quote));
      return join_text(choices, ", ", " or ");
    }
    case VariableKind::kText:
      break;
  }
  return {};
}

}  // namespace hvd
