#include "engine/runtime_options.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

constexpr std::chrono::seconds kLongestTime{
    1'000'000'000};  // as in the environment; fits into 63 bits of nanoseconds

const Variable& variable_of(std::string_view option) {
  for (const Variable& variable : variables()) {
    if (variable.option == option) return variable;
  }
  throw Error(text("hvd::Options::", option, " has no variable in core/base/config_table.cpp"));
}

std::int64_t choose(const std::optional<std::int64_t>& option, std::string_view name,
                    std::int64_t fallback) {
  const Variable& variable = variable_of(name);
  if (option && (*option < variable.lowest || *option > variable.highest)) {
    throw UsageError(text("hvd::Options::", name, ": expected ", variable.lowest, " to ",
                          variable.highest, ", got ", *option));
  }
  return option ? *option : env_int(variable.name).value_or(fallback);
}

Duration choose(const std::optional<std::chrono::milliseconds>& option, std::string_view name,
                Duration fallback) {
  const Variable& variable = variable_of(name);
  if (option && (option->count() < variable.lowest || *option > kLongestTime)) {
    throw UsageError(text("hvd::Options::", name, ": expected ", expected_values(variable, '\''),
                          ", got ", option->count(), " ms"));
  }
  if (option) return *option;
  const auto from_environment = env_seconds(variable.name);
  return from_environment ? Duration(*from_environment) : fallback;
}

ProgressMode progress_mode(const Options& options) {
  if (options.progress) return *options.progress;
  const std::string name = env_choice("PROGRESS").value_or("auto");
  if (name == "inline") return ProgressMode::kInline;
  return name == "background" ? ProgressMode::kBackground : ProgressMode::kAuto;
}

NcclRegister nccl_register() {
  const std::string choice = env_choice("NCCL_REGISTER").value_or("off");
  return choice == "auto" ? NcclRegister::kAuto : NcclRegister::kOff;
}

std::optional<std::string> backend(const Options& options) {
  auto name = options.backend;
  if (!name) {
    name = env_string("BACKEND");
    if (name)
      std::transform(name->begin(), name->end(), name->begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  }
  if (name == "local") name = "self";  // an older name
  return name;
}

double in_seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

const char* name_of(ProgressMode mode) {
  if (mode == ProgressMode::kInline) return "inline";
  return mode == ProgressMode::kBackground ? "background" : "auto";
}

}  // namespace

RuntimeOptions resolve(const Options& options) {
  check_environment();
  RuntimeOptions resolved;
  resolved.fusion_threshold =
      choose(options.fusion_threshold_bytes, "fusion_threshold_bytes", resolved.fusion_threshold);
  resolved.cache_capacity =
      static_cast<std::size_t>(choose(options.cache_capacity, "cache_capacity",
                                      static_cast<std::int64_t>(resolved.cache_capacity)));
  resolved.schedule_lock = options.schedule_lock
                               ? *options.schedule_lock
                               : env_switch("SCHEDULE_LOCK").value_or(resolved.schedule_lock);
  resolved.progress = progress_mode(options);
  resolved.stall_warning = choose(options.stall_warning, "stall_warning", resolved.stall_warning);
  resolved.stall_shutdown =
      choose(options.stall_shutdown, "stall_shutdown", resolved.stall_shutdown);
  resolved.deadlock_timeout =
      choose(options.deadlock_timeout, "deadlock_timeout", resolved.deadlock_timeout);
  resolved.peer_timeout = choose(options.peer_timeout, "peer_timeout", resolved.peer_timeout);
  resolved.start_timeout = choose(options.init_timeout, "init_timeout", resolved.start_timeout);
  if (const auto radix = env_int("CONTROL_RADIX"))
    resolved.control_radix = static_cast<int>(*radix);
  if (const auto device = env_int("DEVICE")) resolved.device = static_cast<int>(*device);
  resolved.nccl_register = nccl_register();
  if (env_choice("NCCL_LAUNCH").value_or("thread") == "nonblocking")
    resolved.nccl_launch = NcclLaunch::kNonblocking;
  resolved.backend = backend(options);
  resolved.timeline_path = options.timeline_path ? options.timeline_path : env_string("TIMELINE");
  resolved.init_method_is_program = options.init_method && !options.init_method->empty();
  resolved.init_method =
      resolved.init_method_is_program ? options.init_method : env_string("INIT_METHOD");
  resolved.rank = options.rank;
  resolved.world_size = options.world_size;
  return resolved;
}

std::string describe_settings(const Options& options) {
  std::vector<std::string> settings;
  const auto add = [&](const char* option, const auto& value, const auto& text_of) {
    if (value) settings.push_back(text("hvd::Options::", option, "=", text_of(*value)));
  };
  const auto as_it_is = [](const auto& value) { return value; };
  add("fusion_threshold_bytes", options.fusion_threshold_bytes, as_it_is);
  add("cache_capacity", options.cache_capacity, as_it_is);
  add("schedule_lock", options.schedule_lock, [](bool value) { return value ? 1 : 0; });
  add("progress", options.progress, name_of);
  add("stall_warning", options.stall_warning, in_seconds);
  add("stall_shutdown", options.stall_shutdown, in_seconds);
  add("peer_timeout", options.peer_timeout, in_seconds);
  add("backend", options.backend, as_it_is);
  add("timeline_path", options.timeline_path, as_it_is);
  add("init_method", options.init_method, as_it_is);
  add("rank", options.rank, as_it_is);
  add("world_size", options.world_size, as_it_is);
  add("init_timeout", options.init_timeout, in_seconds);
  for (std::string& variable : variables_in_force(VariableUse::kRuntime))
    settings.push_back(std::move(variable));
  if (settings.empty()) return "all settings are the defaults";
  return "settings: " + join_text(settings, ", ");
}

}  // namespace hvd::runtime

namespace hvd {

std::optional<int> requested_check_interval() {
  const auto reductions = env_int("CHECK_EVERY");
  return reductions ? std::optional(static_cast<int>(*reductions)) : std::nullopt;
}

}  // namespace hvd
