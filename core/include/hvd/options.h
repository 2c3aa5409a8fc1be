#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace hvd {

/// @addtogroup start
/// @{

/// Which thread makes progress between submission and wait().
enum class ProgressMode {
  kAuto,        ///< inline when this rank has less than two cores, background otherwise
  kInline,      ///< the submitting thread makes progress as far as possible without blocking
  kBackground,  ///< the runtime's own thread, woken for it
};

/// The options of `init()`. A field that is not set takes its value from the environment variable
/// named beside it, or else the default. docs/configuration.md describes each.
struct Options {
  /// Batches stop growing at this many bytes. HVD_FUSION_THRESHOLD; default 64 MiB; 0 turns
  /// fusion off.
  std::optional<std::int64_t> fusion_threshold_bytes = {};
  /// The number of tensors whose negotiation result is cached. HVD_CACHE_CAPACITY; default 1024; 0
  /// turns the cache off.
  std::optional<std::int64_t> cache_capacity = {};
  /// Schedule replay: steps that repeat are not negotiated. HVD_SCHEDULE_LOCK (0 or 1); default on.
  std::optional<bool> schedule_lock = {};
  /// Which thread makes progress between submission and wait(). HVD_PROGRESS (auto, inline,
  /// background); default auto: see ProgressMode.
  std::optional<ProgressMode> progress = {};
  /// An operation that some ranks have not submitted is reported after this long.
  /// HVD_STALL_WARNING (seconds); default 30 s; 0 = never.
  std::optional<std::chrono::milliseconds> stall_warning = {};
  /// Such an operation ends with StalledError after this long. HVD_STALL_SHUTDOWN (seconds);
  /// default 600 s; 0 = never.
  std::optional<std::chrono::milliseconds> stall_shutdown = {};
  /// When every rank has a waiting thread, and no rank has submitted an operation for this long,
  /// the operations end with StalledError. HVD_DEADLOCK_TIMEOUT (seconds); default 10 s; 0 = never.
  std::optional<std::chrono::milliseconds> deadlock_timeout = {};
  /// A peer that gives no sign of life for this long is lost. HVD_PEER_TIMEOUT (seconds); default
  /// 30 s.
  std::optional<std::chrono::milliseconds> peer_timeout = {};
  /// An explicit choice of backend: "shm", "mpi", "ucx", "hierarchical", "nccl" or "self"
  /// ("local" means the same). HVD_BACKEND; default: the best that all ranks can use.
  std::optional<std::string> backend = {};
  /// Chrome trace, one file per rank: "{rank}" is replaced, or ".rankN" is inserted. HVD_TIMELINE;
  /// by default no trace is written.
  std::optional<std::string> timeline_path = {};
  /// How the ranks find each other: "tcp://HOST:PORT", which rank 0 serves; "file:///path", in a
  /// folder that all ranks can write to; "env://", as torchrun sets it; "mpi://". HVD_INIT_METHOD.
  /// If it is unset or empty: MPI if its launcher has started this process, "env://" if torchrun
  /// has, else a job of one rank. See docs/launching.md.
  std::optional<std::string> init_method = {};
  /// The rank of this process, 0 to world_size - 1. HVD_RANK, then RANK. MPI assigns its own ranks.
  std::optional<int> rank = {};
  /// HVD_SIZE, then WORLD_SIZE.
  std::optional<int> world_size = {};
  /// How long init() waits for the other ranks. HVD_START_TIMEOUT (seconds); default 300 s.
  std::optional<std::chrono::milliseconds> init_timeout = {};
};

/// The value of HVD_CHECK_EVERY, for adapters to frameworks; no value when it is unset. Throws
/// UsageError when it is not a whole number from 0 to 1000000000. Thread-safe.
std::optional<int> requested_check_interval();

/// @}

}  // namespace hvd
