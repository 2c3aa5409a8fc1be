// The one list of environment variables. docs/configuration.md has the same rows; base_test
// compares the two, and prints the expected row if they differ.
#include "base/config.h"

namespace hvd {
namespace {

constexpr std::int64_t kMaxFusionBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMaxCacheEntries = 1 << 20;  // wire::kMaxSlots
constexpr std::int64_t kMaxControlRadix = 1 << 20;  // wire::kMaxRanks
constexpr std::int64_t kMaxDevices = 1 << 10;

constexpr Variable kVariables[] = {
    {.name = "FUSION_THRESHOLD",
     .kind = VariableKind::kWhole,
     .option = "fusion_threshold_bytes",
     .highest = kMaxFusionBytes,
     .fallback = "67108864",
     .meaning = "tensors that are ready together are reduced in one call, until the call would "
                "exceed this many bytes; 0 turns fusion off"},
    {.name = "CACHE_CAPACITY",
     .kind = VariableKind::kWhole,
     .option = "cache_capacity",
     .highest = kMaxCacheEntries,
     .fallback = "1024",
     .meaning = "tensors whose negotiation is remembered, so that the next one costs a bit instead "
                "of a request; 0 turns it off"},
    {.name = "SCHEDULE_LOCK",
     .kind = VariableKind::kSwitch,
     .option = "schedule_lock",
     .fallback = "1",
     .meaning = "steps that repeat are run without being negotiated ([decision "
                "10](decisions/0010-schedule-replay.md)); 0: never"},
    {.name = "PROGRESS",
     .kind = VariableKind::kChoice,
     .option = "progress",
     .choices = "auto|inline|background",
     .fallback = "auto",
     .meaning =
         "which thread moves operations on while the program computes: `background` the runtime's "
         "own thread, `inline` the submitting thread as far "
         "as is possible at once, `auto` inline where a rank has less than two cores, of the "
         "affinity mask and of what cgroups grant "
         "([decision 11](decisions/0011-what-a-steady-step-costs.md)); the choice is in the "
         "log at level `info`"},
    {.name = "STALL_WARNING",
     .kind = VariableKind::kSeconds,
     .option = "stall_warning",
     .fallback = "30",
     .meaning = "seconds until an operation that some ranks have not submitted is reported, with "
                "their names; 0: never"},
    {.name = "STALL_SHUTDOWN",
     .kind = VariableKind::kSeconds,
     .option = "stall_shutdown",
     .fallback = "600",
     .meaning = "seconds until such an operation ends with `StalledError`, and until work that "
                "does not leave a GPU's queue, or a collective that every rank has submitted and "
                "that moves no data, is a lost peer; "
                "0: never"},
    {.name = "DEADLOCK_TIMEOUT",
     .kind = VariableKind::kSeconds,
     .option = "deadlock_timeout",
     .fallback = "10",
     .meaning = "seconds after which operations end with `StalledError` when a thread of every "
                "rank waits for other ranks and no rank submits an operation; longer if another "
                "thread of a waiting program submits at long intervals; 0: never"},
    {.name = "PEER_TIMEOUT",
     .kind = VariableKind::kSeconds,
     .option = "peer_timeout",
     .lowest = 1,
     .fallback = "30",
     .meaning = "seconds without a heartbeat until a peer counts as lost (a peer that dies on "
                "the same host is noticed at once)"},
    {.name = "START_TIMEOUT",
     .kind = VariableKind::kSeconds,
     .option = "init_timeout",
     .lowest = 1,
     .fallback = "300",
     .meaning = "seconds that `hvd::init()` waits for the other ranks, MPI's own start included, "
                "and that a NCCL communicator may take to be created"},
    {.name = "INIT_METHOD",
     .option = "init_method",
     .otherwise = "by the environment: MPI's launcher, torchrun's variables, else one rank alone",
     .meaning = "how the ranks find each other: `tcp://HOST:PORT`, which rank 0 serves, "
                "`file:///path` of a file that all ranks share, `env://` or `mpi://` "
                "([without MPI](launching.md#without-mpi)); with it `HVD_RANK` and `HVD_SIZE`, or "
                "`RANK` and `WORLD_SIZE`"},
    {.name = "CONTROL_RADIX",
     .kind = VariableKind::kWhole,
     .highest = kMaxControlRadix,
     .fallback = "32",
     .meaning = "jobs of several hosts and more ranks than this and one merge their reports on a "
                "tree, in which no rank receives from more ranks than this; less than 2: never. "
                "Equal on all ranks"},
    {.name = "BACKEND",
     .kind = VariableKind::kText,
     .option = "backend",
     .otherwise =
         "by set and operation: `shm` where all ranks share a host, `hierarchical` where some do "
         "([decision 13](decisions/0013-hierarchical.md)), else `mpi` or `ucx`, which carries the "
         "job's messages",
     .meaning = "`mpi` or `ucx`, `shm`, `hierarchical` or `self` (one rank only; `local` means the "
                "same): no other backend is used, so "
                "an operation that it does not have fails "
                "(`hierarchical` has allreduce, allgather and broadcast); process sets of one rank "
                "need no transport and ignore it. GPU tensors: "
                "`nccl` where all ranks can use it; naming another sends them through the host's "
                "memory over that one"},
    {.name = "DEVICE",
     .kind = VariableKind::kWhole,
     .highest = kMaxDevices,
     .otherwise = "local rank modulo the GPUs that the process sees; in [elastic "
                  "jobs](elastic.md#on-a-gpu) `LOCAL_RANK` instead of the local rank",
     .meaning = "the GPU that this rank works with"},
    {.name = "NCCL_LIBRARY",
     .otherwise = "the one that is loaded, else the system's, else the one that hvd was built with",
     .meaning = "the `libnccl.so.2` to use"},
    {.name = "NCCL_LAUNCH",
     .kind = VariableKind::kChoice,
     .choices = "thread|nonblocking",
     .fallback = "thread",
     .meaning =
         "`thread`: a separate thread makes NCCL's calls, with communicators that block; "
         "`nonblocking`: the engine's thread makes them, and NCCL starts a thread for each launch "
         "([decision 25](decisions/0025-nccl-launches-on-a-thread.md))"},
    {.name = "NCCL_REGISTER",
     .kind = VariableKind::kChoice,
     .choices = "auto|off",
     .removed_choice = "window",
     .instead = "set 'auto' to register fusion buffers without symmetric windows, or 'off'",
     .fallback = "off",
     .meaning =
         "`auto`: fusion buffers are registered with NCCL 2.19 and newer. They then take twice the "
         "fusion threshold plus 8 MiB (136 MiB) of the GPU's memory per process set ([decision "
         "14](decisions/0014-nccl-behind-a-seam.md)). `off`: they are not registered. Where ranks "
         "differ, off for all. `auto` is experimental: it has not been measured"},
    {.name = "SHM_ALLOCATOR",
     .kind = VariableKind::kSwitch,
     .otherwise = "only large gradients",
     .meaning = "which CPU tensors of LibTorch lie in shared memory ([LibTorch guide](torch.md)): "
                "1 all large ones ([decision 16](decisions/0016-shared-allocator.md)), 0 none, and "
                "if it is not set those gradients that are reduced there ([decision "
                "45](decisions/0045-gradients-in-shared-memory.md))"},
    {.name = "CHECK_EVERY",
     .kind = VariableKind::kWhole,
     .option = "DistributedOptimizerOptions::check_every",
     .highest = 1'000'000'000,
     .fallback = "100",
     .meaning =
         "after how many reductions of gradients the ranks of a `DistributedOptimizer` compare "
         "their parameters, which they also do "
         "before the first update and, if this is more than 10, after 10 ([decision "
         "18](decisions/0018-parameters-are-compared.md)); 0: "
         "never. Read by the constructor, "
         "which throws the error"},
    {.name = "TIMELINE",
     .option = "timeline_path",
     .otherwise = "none",
     .meaning = "writes a trace in Chrome's format, one file per rank: `{rank}` in the path is "
                "replaced, else `.rankN` goes before the extension"},
    {.name = "LOG_LEVEL",
     .kind = VariableKind::kChoice,
     .choices = "trace|debug|info|warning|warn|error|fatal|off",
     .fallback = "warning",
     .meaning = "what is logged, to standard error, with rank and host; at `info` also which of "
                "these variables are in force"},

    {.name = "MPI_LIBRARY",
     .otherwise = "that of the launcher, else found by the loader",
     .meaning = "path of the `libmpi_abi.so.1` to use for jobs over MPI "
                "([launching](launching.md#which-mpi))"},

    {.name = "MPIRUN",
     .use = VariableUse::kLauncher,
     .meaning = "the `mpirun` to use instead of the first on `PATH`; if it is set, `hvdrun` "
                "starts ranks with it unless `--controller` says otherwise"},
    {.name = "RANK", .use = VariableUse::kLauncher, .meaning = "the rank"},
    {.name = "SIZE", .use = VariableUse::kLauncher, .meaning = "the number of ranks"},
    {.name = "LOCAL_RANK",
     .use = VariableUse::kLauncher,
     .meaning = "the rank among the ranks of one host"},
    {.name = "LOCAL_SIZE",
     .use = VariableUse::kLauncher,
     .meaning = "the number of ranks of one host"},
    {.name = "JOB_NAME",
     .use = VariableUse::kLauncher,
     .meaning = "without MPI: the job's name, by default the launcher's id of the run; a rank of "
                "another job at the same place is refused"},
    {.name = "JOB_TOKEN",
     .use = VariableUse::kLauncher,
     .meaning = "without MPI: the job's secret; a rank with another one is refused, as is a node "
                "that [joins an elastic job](elastic.md#nodes-that-join-by-themselves)"},
    {.name = "JOB_ID",
     .use = VariableUse::kLauncher,
     .meaning = "in an [elastic job](elastic.md): a random id of this start of the job"},
    {.name = "WORKER_ID",
     .use = VariableUse::kLauncher,
     .meaning = "in an [elastic job](elastic.md): the number of this process, which the job uses "
                "once; hvd removes it from the environment"},
    {.name = "MEMBER_SOCKET",
     .use = VariableUse::kLauncher,
     .meaning = "in an elastic job: the descriptor of the process's connection to its agent; hvd "
                "removes it from the environment"},
    {.name = "OUTPUT_TTY",
     .use = VariableUse::kLauncher,
     .meaning =
         "1 when the rank's output ends on a terminal, which the rank cannot find out itself"},

    {.name = "TEST_HOSTS",
     .use = VariableUse::kTest,
     .meaning = "`a,a,b`: one name per rank; ranks with different names treat each other as on "
                "different hosts. A job that is run with it logs a warning"},
    {.name = "TEST_WATCHDOG_SECONDS",
     .use = VariableUse::kTest,
     .meaning = "how long a test may take before it prints the state of its ranks"},
    {.name = "TEST_HOSTID_PER_RANK",
     .use = VariableUse::kTest,
     .meaning = "`test/gpu`: NCCL treats each rank as the only one on its host"},
    {.name = "TEST_NCCL_FOLDER",
     .use = VariableUse::kTest,
     .meaning =
         "`test/gpu`: the folder in which ranks of a simulated NCCL exchange their launches"},
    {.name = "TEST_SKIP_UNSHARED",
     .use = VariableUse::kTest,
     .meaning = "`test/gpu`: a job whose ranks this NCCL does not let share a GPU is skipped"},
    {.name = "SIM_SEEDS",
     .use = VariableUse::kTest,
     .meaning = "how many seeds the simulations run"},
    {.name = "FUZZ_SECONDS", .use = VariableUse::kTest, .meaning = "how long the fuzzers run"},
    {.name = "GPU_SECONDS",
     .use = VariableUse::kTest,
     .meaning = "how long `test/gpu/run.sh` may take"},
    {.name = "GPU_BUILD",
     .use = VariableUse::kTest,
     .meaning = "the folder of `test/gpu/run.sh`'s binaries, `build/gpu` if unset"},
};

}  // namespace

std::span<const Variable> variables() noexcept { return kVariables; }

}  // namespace hvd
