#include "runtime/runtime_options.h"

#include "base/config.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

constexpr std::int64_t kMostFusionBytes = std::int64_t{1} << 40;
constexpr std::chrono::seconds kLongestTime{1'000'000'000};  // as in the environment; inside 63 bits of nanoseconds
constexpr std::int64_t kMostControlRadix = 1 << 20;  // wire::kMaxRanks
constexpr std::int64_t kMostDevices = 1 << 10;
constexpr std::int64_t kMostCacheEntries = 1 << 20;  // wire::kMaxSlots

std::int64_t choose(const std::optional<std::int64_t>& option, const char* option_name, const char* variable,
                    std::int64_t highest, std::int64_t fallback) {
  if (option && (*option < 0 || *option > highest)) {
    throw UsageError("hvd::Options::" + std::string(option_name) + ": expected 0 to " + std::to_string(highest) + ", got " +
                     std::to_string(*option));
  }
  return option ? *option : env_int(variable, 0, highest).value_or(fallback);
}

Duration choose(const std::optional<std::chrono::milliseconds>& option, const char* option_name, const char* variable,
                Duration fallback) {
  if (option && (option->count() < 0 || *option > kLongestTime)) {
    throw UsageError("hvd::Options::" + std::string(option_name) + ": expected 0 to " + std::to_string(kLongestTime.count()) +
                     " s, got " + std::to_string(option->count()) + " ms");
  }
  if (option) return *option;
  const auto from_environment = env_seconds(variable);
  return from_environment ? Duration(*from_environment) : fallback;
}

}  // namespace

namespace {

ProgressMode progress_mode(const Options& options) {
  if (options.progress) return *options.progress;
  const std::string name = env_string("PROGRESS").value_or("auto");
  if (name == "auto") return ProgressMode::kAuto;
  if (name == "inline") return ProgressMode::kInline;
  if (name == "background") return ProgressMode::kBackground;
  throw UsageError("progress (HVD_PROGRESS): expected 'auto', 'inline' or 'background', got '" + name + "'");
}

NcclRegister nccl_register() {
  const std::string choice = env_string("NCCL_REGISTER").value_or("auto");
  if (choice == "auto") return NcclRegister::kAuto;
  if (choice == "window") return NcclRegister::kWindow;
  if (choice == "off") return NcclRegister::kOff;
  throw UsageError("HVD_NCCL_REGISTER: expected 'auto', 'window' or 'off', got '" + choice + "'");
}

bool auto_not_off(const std::string& variable) {
  const std::string choice = env_string(variable).value_or("auto");
  if (choice == "auto" || choice == "off") return choice == "auto";
  throw UsageError("HVD_" + variable + ": expected 'auto' or 'off', got '" + choice + "'");
}

}  // namespace

RuntimeOptions resolve(const Options& options) {
  RuntimeOptions resolved;
  resolved.fusion_threshold = choose(options.fusion_threshold_bytes, "fusion_threshold_bytes", "FUSION_THRESHOLD",
                                     kMostFusionBytes, resolved.fusion_threshold);
  resolved.cache_capacity = static_cast<std::size_t>(
      choose(options.cache_capacity, "cache_capacity", "CACHE_CAPACITY", kMostCacheEntries,
             static_cast<std::int64_t>(resolved.cache_capacity)));
  resolved.schedule_lock = options.schedule_lock ? *options.schedule_lock : env_int("SCHEDULE_LOCK", 0, 1).value_or(1) == 1;
  resolved.progress = progress_mode(options);
  resolved.stall_warning = choose(options.stall_warning, "stall_warning", "STALL_WARNING", resolved.stall_warning);
  resolved.stall_shutdown = choose(options.stall_shutdown, "stall_shutdown", "STALL_SHUTDOWN", resolved.stall_shutdown);
  resolved.deadlock_timeout = choose(options.deadlock_timeout, "deadlock_timeout", "DEADLOCK_TIMEOUT", resolved.deadlock_timeout);
  resolved.peer_timeout = choose(options.peer_timeout, "peer_timeout", "PEER_TIMEOUT", resolved.peer_timeout);
  resolved.start_timeout = choose(std::nullopt, "start_timeout", "START_TIMEOUT", resolved.start_timeout);
  resolved.control_radix = static_cast<int>(choose(std::nullopt, "control_radix", "CONTROL_RADIX", kMostControlRadix, resolved.control_radix));
  if (resolved.peer_timeout == Duration::zero()) {
    throw UsageError("peer_timeout (HVD_PEER_TIMEOUT): expected more than 0, got 0; a lost peer must be noticed some time");
  }
  if (const auto device = env_int("DEVICE", 0, kMostDevices)) resolved.device = static_cast<int>(*device);
  resolved.nccl_register = nccl_register();
  resolved.cuda_aware_mpi = auto_not_off("CUDA_AWARE_MPI");
  resolved.backend = options.backend ? options.backend : env_string("BACKEND");
  resolved.timeline_path = options.timeline_path ? options.timeline_path : env_string("TIMELINE");
  return resolved;
}

}  // namespace hvd::runtime
