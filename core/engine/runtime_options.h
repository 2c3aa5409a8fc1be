#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "hvd/options.h"
#include "hvd/status.h"

namespace hvd::runtime {

/// How NCCL is called: on a thread of hvd with blocking communicators, or with nonblocking
/// communicators, for which NCCL starts a thread per launch.
enum class NcclLaunch : std::uint8_t { kThread, kNonblocking };
enum class NcclRegister : std::uint8_t { kOff, kAuto };

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
  /// If a job of several hosts has more than control_radix + 1 ranks, ranks merge reports on their
  /// way to rank 0, and no rank receives reports from more than control_radix ranks. Less than 2:
  /// never.
  int control_radix = 32;
  /// The ordinal of the GPU in this process; unset: the local rank modulo the number of GPUs.
  std::optional<int> device = {};
  /// If `device` is unset, this number modulo the number of GPUs selects the GPU; unset: the local
  /// rank. Set in jobs whose local ranks may change, because a program's tensors stay on their GPU.
  std::optional<int> device_slot = {};
  /// Whether fusion buffers are registered with NCCL, if its version can.
  NcclRegister nccl_register = NcclRegister::kOff;
  NcclLaunch nccl_launch = NcclLaunch::kThread;
  std::optional<std::string> backend = {};
  std::optional<std::string> timeline_path = {};
  /// How the ranks find each other; unset: by the environment.
  std::optional<std::string> init_method = {};
  bool init_method_is_program = false;  ///< from Options, not from the environment
  std::optional<int> rank = {};         ///< given by the program
  std::optional<int> world_size = {};
  /// Whether the runtime has an engine thread. Without one, the caller drives the engine through
  /// Runtime::step(), as simulations do.
  bool background_thread = true;
  /// In an elastic job: called once with the cause of failure, on the thread that drives the
  /// engine. Must not call the runtime.
  std::function<void(const Status&)> on_failure = {};
  /// In an elastic job: the worker number of each rank, for texts. Empty in other jobs.
  std::vector<std::uint64_t> worker_of_rank = {};
};

/// The program's value of each option, else the environment's, else the default. @throws UsageError
RuntimeOptions resolve(const Options&);
/// A readable list of the settings of the program and the environment that differ from the default.
std::string describe_settings(const Options&);

}  // namespace hvd::runtime
