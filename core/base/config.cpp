#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "hvd/error.h"

namespace hvd {
namespace {

// Converts seconds to milliseconds that fit into 63 bits of nanoseconds.
constexpr double kMostSeconds = 1e9;

struct Setting {
  const Variable& variable;
  std::string full_name;
  std::string value;
};

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::optional<Setting> find(const Variable& variable) {
  for (const char* const prefix : {"HVD_", "HOROVOD_"}) {
    if (variable.use != VariableUse::kRuntime && prefix[1] == 'O') continue;
    std::string full = prefix + std::string(variable.name);
    const char* const value = std::getenv(full.c_str());
    if (value != nullptr && *value != '\0') return Setting{variable, std::move(full), value};
  }
  return std::nullopt;
}

const Variable& known(std::string_view name) {
  const auto all = variables();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Variable& variable) { return variable.name == name; });
  if (found == all.end())
    throw Error("HVD_" + std::string(name) +
                " is not in the table of variables (core/base/config_table.cpp)");
  return *found;
}

[[noreturn]] void reject(const Setting& setting) {
  throw UsageError("environment variable " + setting.full_name + ": expected " +
                   expected_values(setting.variable, '\'') + ", got '" + setting.value + "'");
}

template <class Number>
std::optional<Number> parse(const std::string& text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

std::int64_t whole(const Setting& setting) {
  const auto value = parse<std::int64_t>(setting.value);
  if (!value || *value < setting.variable.lowest || *value > setting.variable.highest)
    reject(setting);
  return *value;
}

std::chrono::milliseconds seconds(const Setting& setting) {
  const auto value = parse<double>(setting.value);
  if (!value || !std::isfinite(*value) || *value < 0 || *value > kMostSeconds) reject(setting);
  const std::chrono::milliseconds result(std::llround(*value * 1000));
  if (result.count() < setting.variable.lowest) reject(setting);
  return result;
}

bool on_or_off(const Setting& setting) {
  const std::string value = lower(setting.value);
  for (const char* const yes : {"1", "yes", "true", "on"}) {
    if (value == yes) return true;
  }
  for (const char* const no : {"0", "no", "false", "off"}) {
    if (value == no) return false;
  }
  reject(setting);
}

std::vector<std::string_view> split(std::string_view choices) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= choices.size();) {
    const std::size_t end = std::min(choices.find('|', begin), choices.size());
    parts.push_back(choices.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string choice(const Setting& setting) {
  std::string value = lower(setting.value);
  if (!value.empty() && value == setting.variable.removed_choice) {
    throw UsageError("environment variable " + setting.full_name + ": the value '" + setting.value +
                     "' was removed; " + std::string(setting.variable.instead));
  }
  for (const std::string_view one : split(setting.variable.choices)) {
    if (value == one) return value;
  }
  reject(setting);
}

void check(const Setting& setting) {
  switch (setting.variable.kind) {
    case VariableKind::kWhole:
      static_cast<void>(whole(setting));
      break;
    case VariableKind::kSeconds:
      static_cast<void>(seconds(setting));
      break;
    case VariableKind::kSwitch:
      static_cast<void>(on_or_off(setting));
      break;
    case VariableKind::kChoice:
      static_cast<void>(choice(setting));
      break;
    case VariableKind::kText:
      break;
  }
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
  // Variables that hvdrun sets for its supervisors and ranks, and those that only tests read.
  if (name.starts_with("LAUNCHER_") || name.starts_with("TEST_")) return true;
  const auto all = variables();
  return std::any_of(all.begin(), all.end(),
                     [&](const Variable& variable) { return variable.name == name; });
}

/// Empty if no known name is similar.
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

/// Variables that hvd had once. Setting one is an error, and `meaning` says what to do instead.
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
  return read<std::string>(name, [](const Setting& setting) { return setting.value; });
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
      throw UsageError("environment variable " + setting->full_name +
                       ": expected it unset, because it was removed, got '" + setting->value +
                       "'; " + std::string(removed.meaning));
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
    const std::string_view text(*entry);
    constexpr std::string_view kPrefix = "HVD_";
    if (!text.starts_with(kPrefix)) continue;
    const std::string_view name = text.substr(kPrefix.size(), text.find('=') - kPrefix.size());
    if (is_known(name)) continue;
    const std::string_view like = nearest(name);
    found.push_back("HVD_" + std::string(name) + " is no variable of hvd and has no effect" +
                    (like.empty() ? "" : "; did you mean HVD_" + std::string(like) + "?"));
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string expected_values(const Variable& variable, char quote) {
  switch (variable.kind) {
    case VariableKind::kWhole:
      return "a whole number from " + std::to_string(variable.lowest) + " to " +
             std::to_string(variable.highest);
    case VariableKind::kSeconds:
      return variable.lowest > 0 ? "seconds, more than 0, to 1000000000"
                                 : "seconds, from 0 to 1000000000";
    case VariableKind::kSwitch:
      return "1, yes, true or on, or 0, no, false or off";
    case VariableKind::kChoice: {
      const auto choices = split(variable.choices);
      std::string text;
      for (std::size_t i = 0; i < choices.size(); ++i) {
        if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
        text += quote + std::string(choices[i]) + quote;
      }
      return text;
    }
    case VariableKind::kText:
      break;
  }
  return {};
}

}  // namespace hvd
