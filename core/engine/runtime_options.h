#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"
#include "hvd/options.h"

namespace hvd::runtime {

/// A thread of hvd's with communicators that block, or NCCL's own, one for each launch.
enum class NcclLaunch : std::uint8_t { kThread, kNonblocking };
enum class NcclRegister : std::uint8_t { kOff, kAuto, kWindow };

/// Options with every value decided.
struct RuntimeOptions {
  std::int64_t fusion_threshold = 64 << 20;
  std::size_t cache_capacity = 1024;
  bool schedule_lock = true;
  ProgressMode progress = ProgressMode::kAuto;
  Duration stall_warning = std::chrono::seconds(30);
  Duration stall_shutdown = std::chrono::minutes(10);
  Duration deadlock_timeout = std::chrono::seconds(10);
  Duration peer_timeout = std::chrono::seconds(30);
  Duration start_timeout = std::chrono::minutes(5);
  /// Reports are merged on their way in jobs of several hosts and more than one rank above this
  /// many; nobody hears more ranks than this. Less than 2: never.
  int control_radix = 32;
  /// The GPU to use, as the process counts them; unset: the local rank modulo their number.
  std::optional<int> device = {};
  /// NCCL registers fusion buffers where its version can, and makes symmetric windows of them.
  NcclRegister nccl_register = NcclRegister::kOff;
  /// Who makes NCCL's calls.
  NcclLaunch nccl_launch = NcclLaunch::kThread;
  std::optional<std::string> backend = {};
  std::optional<std::string> timeline_path = {};
  /// How the ranks find each other; unset: as the environment suggests.
  std::optional<std::string> init_method = {};
  bool init_method_is_program = false;  ///< it is Options', not the environment's
  std::optional<int> rank = {};         ///< as the program has it
  std::optional<int> world_size = {};
  /// A thread of the runtime's own moves things on. Without it somebody has to call Runtime::step()
  /// (simulations).
  bool background_thread = true;
};

/// What the program asked for, else the environment, else the default. @throws UsageError
RuntimeOptions resolve(const Options&);
/// For people: what the program and the environment ask for that is not the default.
std::string describe_settings(const Options&);

}  // namespace hvd::runtime
