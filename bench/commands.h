#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "bench/exercise.h"
#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"
#include "bench/step_contender.h"
#include "hvd/collectives.h"

namespace CLI {
class App;
}  // namespace CLI

namespace hvd::bench {

struct StepOptions {
  std::vector<std::string> sets = {"resnet50", "gpt2", "small1000", "mnist"};
  std::vector<std::string> contenders = {"one", "alone",    "hvd",    "mpi-chunked",
                                         "mpi", "mpi-flat", "reducer"};
  bool compute = false;
  Update update = Update::kSgd;
  int batch_size = 64;
  RepetitionLimits repetitions = {.budget_seconds = 20, .least = 20, .most = 500};
  /// Untimed steps before each timed one, because other contenders have disturbed the caches and
  /// the schedule since this contender's last turn.
  int lead = 1;
  /// 0: the cores divided by the ranks of this host
  int threads = 0;
  /// File with the results of gloo_peers.py, which are shown beside hvd's; empty: no file.
  std::string gloo_path;
};

/// Measures a training step of every contender with every parameter set. Collective over the ranks
/// of the session; rank 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
/// @throws std::invalid_argument, std::runtime_error
Json run_step(const Session& session, const StepOptions& options, std::ostream& out);

struct ShardedOptions {
  int threads = 0;  ///< LibTorch's threads per rank; 0: the cores divided by the ranks of this host
  std::string set = "gpt2";
  int lead = 4;  ///< untimed steps before each timed one
  RepetitionLimits repetitions = {.budget_seconds = 60, .least = 5, .most = 200};
};

/// Measures a training step with Adam, and the bytes of Adam's state, for a ShardedOptimizer and a
/// DistributedOptimizer. Collective over the ranks of the session; rank 0 prints.
/// @return {"correct": ..., ...}, on every rank
Json run_sharded(const Session& session, const ShardedOptions& options, std::ostream& out);

struct LevelsOptions {
  std::vector<std::string> sets = {"mnist", "small1000"};
  std::vector<std::string> contenders = {"loop-again", "accelerator", "trainer", "weighted",
                                         "weighted-unequal"};
  int threads = 0;      ///< see ShardedOptions::threads
  int batch_size = 64;  ///< images per rank
  double max_norm = 0;  ///< gradients are clipped to this norm; 0: not at all
  int steps = 50;       ///< timed steps of a run
  int lead = 20;        ///< untimed steps at the beginning of a run
  RepetitionLimits repetitions = {.budget_seconds = 120, .least = 5, .most = 500};
};

/// Returns the names of the contenders that run_levels() compares with the hand-written loop.
std::vector<std::string> level_contender_names();

/// Measures the step of an Accelerator, of a Trainer, and of a loop with set_weight(), beside that
/// of a hand-written loop with a DistributedOptimizer. Collective over the ranks of the session;
/// rank 0 prints. Leaves no files.
/// @return {"correct": ..., "rows": [...]}, on every rank
/// @throws std::runtime_error if LibTorch has a GPU
Json run_levels(const Session& session, const LevelsOptions& options, std::ostream& out);

struct LayersOptions {
  int threads = 0;     ///< see ShardedOptions::threads
  int batch_size = 8;  ///< images per rank
  RepetitionLimits repetitions = {.budget_seconds = 10, .least = 10, .most = 200};
};

/// Measures a single SyncBatchNorm2d layer in sizes of ResNet-50, and its parts: BatchNorm2d and
/// the exchange. Collective over the ranks of the session; rank 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
Json run_layers(const Session& session, const LayersOptions& options, std::ostream& out);

struct CheckpointOptions {
  int threads = 0;               ///< see ShardedOptions::threads
  std::int64_t megabytes = 500;  ///< size of the state, in 10^6 bytes
  int rounds = 5;
  int step_ms = 100;  ///< computation per step
  std::filesystem::path folder = ".";
};

/// Measures how much saving slows the steps of a training, in the foreground and in the background.
/// Collective over the ranks of the session; rank 0 prints. Leaves no files in `folder`.
/// @return {"correct": ..., ...}, on every rank
/// @throws CheckpointError
Json run_checkpoint(const Session& session, const CheckpointOptions& options, std::ostream& out);

struct SafetensorsOptions {
  int threads = 0;               ///< see ShardedOptions::threads
  std::int64_t megabytes = 500;  ///< size of the file, in 10^6 bytes
  int rounds = 9;
  std::filesystem::path folder = ".";
};

/// Measures writing and reading a safetensors file beside `cp --reflink=never` of the same file, in
/// turns, with a warm page cache. Local; every rank has its own file, and rank 0 prints. Leaves no
/// files in `folder`.
/// @return {"correct": ..., ...}, on every rank
/// @throws SafetensorsError
Json run_safetensors(const Session& session, const SafetensorsOptions& options, std::ostream& out);

struct SteadyOptions {
  /// Steps of a run. In every second run, one step has an additional operation.
  int steps = 1000;
  /// Pairs of runs.
  int rounds = 5;
  /// Tensors per step, of 4 KiB each.
  int tensors = 20;
  /// Seconds for which the program is idle afterwards.
  double pause_seconds = 3;
};

/// Measures the cost of leaving schedule replay once, and the share of a core that hvd uses while
/// the program does not call it. Collective over the ranks of the session; rank 0 prints. @return
/// {"deviation": {...}, "disabled": {...}, "idle": {...}}
Json run_steady(const Session& session, const SteadyOptions& options, std::ostream& out);

struct ControlOptions {
  /// Timed operations per combination of waiting and name.
  int repetitions = 1000;
  /// Pause before each operation that measures the wake-up of a sleeping thread, so that the thread
  /// sleeps.
  double pause_ms = 1.0;
  /// Numbers of ranks to simulate.
  std::vector<int> worlds = {64, 256, 1024, 4096, 16384, 100'000};
  int tensors = 161;
};

/// Measures the latency of an allreduce of 8 bytes by the kind of negotiation and by the thread
/// that drives the engine, and the cost of the coordinator in simulated worlds. Collective over the
/// ranks of the session; rank 0 prints.
/// @return {"latency": [...], "worlds": [...]}; the worlds on rank 0 only
Json run_control(const Session& session, const ControlOptions& options, std::ostream& out);

struct CollectivesOptions {
  std::vector<OpKind> kinds = {OpKind::kAllreduce};
  std::size_t lowest_bytes = 4;
  std::size_t highest_bytes = 256 << 20;
  std::size_t factor = 4;
  int loop = 50;  ///< calls of a loop; four above 256 KiB; 1: only single calls
  RepetitionLimits repetitions = {};
  Progress progress = Progress::kCaller;
  Memory memory = Memory::kOrdinary;
  /// File with the results of gloo_peers.py, which are shown beside hvd's; empty: no file.
  std::string gloo_path;
};

/// Measures every kind at every size, and its peers. Collective over the ranks of the session; rank
/// 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
Json run_collectives(const Session& session, const CollectivesOptions& options, std::ostream& out);

struct CarriersOptions {
  std::vector<std::size_t> sizes = {8, std::size_t{1} << 20, std::size_t{64} << 20};
  int rounds = 20;
  /// Limits for one contender at one size in one round.
  RepetitionLimits repetitions = {.budget_seconds = 0.3, .least = 3, .most = 300};
  int tensors = 161;  ///< number of tensors in the first negotiation
};

/// Measures hvd over MPI and over UCX, and the two carriers without hvd, all in turns. Collective
/// over the two ranks of the session, which has joined over UCX and joins again at the end; rank 0
/// prints.
/// @return {"correct": ..., "rows": [...], "first_negotiation": {...}}, on every rank
/// @throws std::runtime_error if there are not two ranks, or if the session has joined over MPI
Json run_carriers(const Session& session, const CarriersOptions& options, std::ostream& out);

struct MessagesOptions {
  std::vector<std::size_t> sizes = {8, 1 << 10, 16 << 10, std::size_t{1} << 20,
                                    std::size_t{64} << 20};
  int loop = 500;  ///< exchanges of a sample; one above 256 KiB
  RepetitionLimits repetitions = {.budget_seconds = 1, .least = 10, .most = 500};
};

/// Measures send() and recv() beside MPI_Send and MPI_Recv: a message from rank 0 to rank 1 and
/// back. Collective over the two ranks of the session; rank 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
/// @throws std::runtime_error if there are not two ranks
Json run_messages(const Session& session, const MessagesOptions& options, std::ostream& out);

/// A subcommand, declared with its options.
struct Command {
  CLI::App* app = nullptr;
  /// Collective over the ranks of the session. "correct" in its result decides the exit code.
  std::function<Json(const Session&, std::ostream&)> measure = {};
  /// Called instead of measure, for a command that needs neither hvd nor MPI.
  std::function<void()> work = {};
};

/// Declares the options for repetitions, which several subcommands share.
void declare_repetitions(CLI::App& app, RepetitionLimits& limits, const std::string& per);
void declare_gloo(CLI::App& app, std::string& path);

/// The subcommands that need LibTorch; empty in a build without it.
std::vector<Command> torch_commands(CLI::App& app);

}  // namespace hvd::bench
