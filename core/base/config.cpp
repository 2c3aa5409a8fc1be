#include "base/config.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "hvd/error.h"

namespace hvd {
namespace {

struct Variable {
  std::string name;
  std::string value;
};

std::optional<Variable> find(const std::string& name) {
  for (const char* prefix : {"HVD_", "HOROVOD_"}) {
    const std::string full = prefix + name;
    const char* value = std::getenv(full.c_str());
    if (value != nullptr && *value != '\0') return Variable{full, value};
  }
  return std::nullopt;
}

[[noreturn]] void reject(const Variable& variable, const std::string& expected) {
  throw UsageError("environment variable " + variable.name + ": expected " + expected + ", got '" + variable.value + "'");
}

}  // namespace

std::optional<std::string> env_string(const std::string& name) {
  const auto variable = find(name);
  if (!variable) return std::nullopt;
  return variable->value;
}

std::optional<std::int64_t> env_int(const std::string& name, std::int64_t lowest, std::int64_t highest) {
  const auto variable = find(name);
  if (!variable) return std::nullopt;
  std::int64_t value = 0;
  const char* end = variable->value.data() + variable->value.size();
  const auto [stop, error] = std::from_chars(variable->value.data(), end, value);
  if (error != std::errc() || stop != end || value < lowest || value > highest) {
    reject(*variable, "a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest));
  }
  return value;
}

std::optional<std::chrono::milliseconds> env_seconds(const std::string& name) {
  const auto variable = find(name);
  if (!variable) return std::nullopt;
  double value = 0;
  const char* end = variable->value.data() + variable->value.size();
  const auto [stop, error] = std::from_chars(variable->value.data(), end, value);
  constexpr double kMost = 1e9;  // keeps the count of nanoseconds inside 63 bits
  if (error != std::errc() || stop != end || !std::isfinite(value) || value < 0 || value > kMost) {
    reject(*variable, "seconds, from 0 to 1000000000");
  }
  return std::chrono::milliseconds(std::llround(value * 1000));
}

}  // namespace hvd
