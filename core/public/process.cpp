#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/config.h"
#include "base/expect.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "bootstrap/backends.h"
#include "bootstrap/build_identity.h"
#include "bootstrap/gpu.h"
#include "bootstrap/join.h"
#include "bootstrap/mpi_module.h"
#include "device/probe.h"
#include "engine/runtime.h"
#include "hvd/background.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/memory.h"
#include "hvd/point_to_point.h"
#include "hvd/store.h"
#include "observe/supervisor_notice.h"
#include "public/elastic_worker.h"
#include "public/process.h"
#include "public/process_handlers.h"

namespace hvd {
namespace runtime {
namespace {

/// How long a process that ends without shutdown() waits until the other ranks leave the job too. A
/// rank that computes for longer than that loses this process as a peer.
constexpr Duration kExitTimeout = std::chrono::seconds(5);
/// Time limit of the calls that check whether a GPU works.
constexpr Duration kDeviceTimeout = std::chrono::seconds(10);

/// Never destroyed: the engine thread may outlive static objects otherwise.
struct Context {
  Mutex lifecycle;  // held through init() and shutdown(), which are collective
  Mutex mutex;
  std::shared_ptr<Runtime> runtime HVD_GUARDED_BY(mutex);
  std::shared_ptr<void> world HVD_GUARDED_BY(lifecycle);  // outlives the runtime
  // The other processes of this host in all jobs since the last replace_job().
  std::vector<ProcessIdentity> neighbours HVD_GUARDED_BY(lifecycle);
  // A job over MPI has failed: its transports may use memory until the process ends.
  bool memory_lost HVD_GUARDED_BY(lifecycle) = false;
  std::optional<int> device HVD_GUARDED_BY(lifecycle);  // of the last job with a GPU
  std::string controller HVD_GUARDED_BY(mutex);
  std::string init_method HVD_GUARDED_BY(mutex);
  std::optional<DumpSignal> dump_signal HVD_GUARDED_BY(lifecycle);
  std::optional<TerminateHandler> terminate_handler HVD_GUARDED_BY(lifecycle);
  const SteadyClock clock{};
  std::once_flag fork_handlers_registered;
  std::once_flag arena_made;
  std::shared_ptr<SharedArena>
      arena;  // once arena_made, written under mutex; tensors in it outlive the runtime
  bool exit_handler_registered HVD_GUARDED_BY(lifecycle) = false;
  bool variables_checked HVD_GUARDED_BY(lifecycle) = false;
  // Whether MPI was active before the first init(). Later it may be active because hvd started it.
  std::optional<bool> program_has_mpi HVD_GUARDED_BY(lifecycle);
  std::atomic<bool> full_reported{false};
  std::atomic<bool> was_initialized{false};
  std::atomic<bool> reconfigure_failed{false};                  // after the end of the former job
  std::optional<RuntimeOptions> elastic HVD_GUARDED_BY(mutex);  // see elastic_options()
  std::atomic<bool> in_elastic_run{false};
  bool job_inherited = false;  // set in a child of fork(), before it has threads
  // Keeps the parent's runtime in a child of fork(), where it has lost its thread and must not be
  // destroyed.
  alignas(std::shared_ptr<Runtime>) std::byte inherited_runtime[sizeof(std::shared_ptr<Runtime>)];
};

Context& context() {
  static Context* const instance = new Context;
  return *instance;
}

// No arena appears between before_fork() and the handlers after it, because its creation needs the
// mutex.
//
// The analysis cannot follow locks that one handler takes and another releases.
void before_fork() HVD_NO_THREAD_SAFETY_ANALYSIS {
  context().mutex.lock();
  if (context().arena) context().arena->before_fork();
}

void after_fork_in_parent() HVD_NO_THREAD_SAFETY_ANALYSIS {
  if (context().arena) context().arena->after_fork_in_parent();
  context().mutex.unlock();
}

/// Removes the child from the job: its messages would mix with its parent's, and its end must not
/// be mistaken for the parent's.
void after_fork_in_child() HVD_NO_THREAD_SAFETY_ANALYSIS {
  Context& process = context();
  if (process.arena) process.arena->after_fork_in_child();
  process.job_inherited = process.job_inherited || process.runtime != nullptr;
  if (process.runtime) {
    process.terminate_handler.reset();
    new (process.inherited_runtime) std::shared_ptr<Runtime>(std::move(process.runtime));
  }
  process.mutex.unlock();
}

/// Needed for a job, and for the arena if the system provides one.
void register_fork_handlers() {
  std::call_once(context().fork_handlers_registered, [] {
    const int error = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (error == 0) return;
    HVD_LOG(kWarning) << "no handlers for fork(): " << std::strerror(error)
                      << "; a child of this process must not end with exit()";
  });
}

/// Opens /dev/null for each of the descriptors 0 to 2 that is closed. Otherwise a connection or
/// shared memory would get that number, and printed text would be written into it. Programs that
/// this process starts inherit these descriptors, as they do standard streams.
void hold_standard_streams() noexcept {
  // open() takes the lowest number that is free.
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor)
    if (::fcntl(descriptor, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) < 0) return;
}

}  // namespace

std::shared_ptr<SharedArena> process_arena() {
  std::call_once(context().arena_made, [] {
    hold_standard_streams();
    register_fork_handlers();
    auto arena = SharedArena::create();
    Context& process = context();
    const MutexLock lock(process.mutex);
    process.arena = std::move(arena);
  });
  const std::shared_ptr<SharedArena>& arena = context().arena;
  return arena && !arena->inherited() ? arena : nullptr;
}

std::shared_ptr<Runtime> runtime_or_null() {
  Context& process = context();
  const MutexLock lock(process.mutex);
  return process.runtime;
}

std::optional<RuntimeOptions> elastic_options() {
  Context& process = context();
  const MutexLock lock(process.mutex);
  return process.elastic;
}

void set_in_elastic_run(bool in_run) noexcept { context().in_elastic_run.store(in_run); }

namespace {

std::string controller_of(Context& process) {
  const MutexLock lock(process.mutex);
  return process.controller;
}

void leave(Context& process, std::optional<Duration> timeout) HVD_REQUIRES(process.lifecycle) {
  auto runtime = runtime_or_null();
  if (!runtime) return;
  process.terminate_handler.reset();
  release_descriptors();
  // This may take minutes, during which SIGUSR1 must still print this rank's state.
  const bool in_order = runtime->shutdown(timeout);
  process.dump_signal.reset();
  if (in_order) {
    observe::notify_supervisor(observe::NoticeKind::kOver, 0, "");
  } else {
    forget_job_peers();
    if (controller_of(process) == "mpi") process.memory_lost = true;
  }
  {
    const MutexLock lock(process.mutex);
    process.runtime.reset();
  }
  runtime.reset();
  process.world.reset();
}

// A program that ends without shutdown() leaves as if it had called it: the other ranks get a
// ShutdownError with that cause instead of hanging.
void leave_at_exit() {
  Context& process = context();
  if (process.in_elastic_run.load() || !process.lifecycle.try_lock()) return;
  const MutexLock lock(process.lifecycle, std::adopt_lock);
  if (const auto runtime = runtime_or_null()) {
    HVD_LOG(kWarning) << "the process ends without hvd::shutdown(); leaving the job";
    runtime->mark_ending();
  }
  try {
    leave(process, kExitTimeout);
  } catch (const UsageError& error) {  // exit() was called in a callback of an operation
    HVD_LOG(kWarning) << error.what();
  }
}

// Makes each line appear as soon as it is printed under hvdrun, even in a pipe. This runs before
// main(), because the buffering must be set before the first output; a program may call setvbuf()
// itself.
[[gnu::constructor]] void buffer_stdout_by_line() {
  if (std::getenv("HVD_OUTPUT_TTY") != nullptr) std::setvbuf(stdout, nullptr, _IOLBF, 0);
}

// Runs before leave_at_exit(), so that hvdrun receives the notice before the peers detect the exit
// and end.
void report_exit(int status, void*) {
  const auto runtime = runtime_or_null();
  if (runtime && !runtime->failed() && !context().in_elastic_run.load())
    observe::notify_supervisor(observe::NoticeKind::kExit, status, "");
}

// A start that fails for lack of descriptors is this rank's own error, even if the error names a
// rank to which this one could not connect. The text of the error is no evidence, because it may
// quote another rank's error.
JobConnection join_within_limits(const std::function<JobConnection()>& join_other) {
  try {
    return join_other();
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& error) {
    release_descriptors();
    if (!ran_out_of_descriptors()) throw;
    throw Error(text(error.what(), "; ", describe_shortage(EMFILE)));
  }
}

// Prepares the process for a job.
RuntimeOptions prepare(Context& process, const Options& options) HVD_REQUIRES(process.lifecycle) {
  if (process.job_inherited) {
    throw UsageError(
        "hvd::init: this process was made by fork() while its parent was in a job, whose "
        "connections it cannot use; "
        "fork before hvd::init(), or start another program");
  }
  hold_standard_streams();
  raise_descriptor_limit();
  reserve_descriptors();
  configure_log_from_environment();
  RuntimeOptions resolved = resolve(options);
  register_fork_handlers();
  if (!process.program_has_mpi) process.program_has_mpi = mpi_is_active();
  return resolved;
}

// Joins the job, and notifies hvdrun if that fails because another rank is lost. This rank is then
// not the first that failed, even if hvdrun sees its end first.
JobConnection join_observed(const RuntimeOptions& options, std::optional<ProgramStore> store) {
  try {
    return join_within_limits([&] { return join_job(options, process_arena(), std::move(store)); });
  } catch (const PeerLostError& loss) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(StatusCode::kPeerLost),
                               observe::without_backtrace(loss.what()), loss.rank());
    throw;
  }
}

// One rank per host logs the warnings, because the ranks of a host mostly have the same
// environment.
void report_settings(Context& process, const Options& options, const Topology& topology)
    HVD_REQUIRES(process.lifecycle) {
  HVD_LOG(kInfo) << describe_settings(options);
  if (std::exchange(process.variables_checked, true) || topology.local_rank != 0) return;
  for (const std::string& text : unknown_variables()) HVD_LOG(kWarning) << text;
}

/// Makes the runtime of a job that the process has joined.
std::shared_ptr<Runtime> make_runtime(Context& process, const RuntimeOptions& options,
                                      JobConnection job) HVD_REQUIRES(process.lifecycle) {
  const Topology topology = job.control->topology();
  set_log_identity(topology.rank, topology.host_name(topology.rank));
  process.world = std::move(job.world);
  for (const ProcessIdentity& one : job.neighbours) {
    const bool known = std::ranges::any_of(process.neighbours, [&](const ProcessIdentity& other) {
      return other.pid == one.pid && other.start_time == one.start_time &&
             other.pid_namespace == one.pid_namespace;
    });
    if (!known) process.neighbours.push_back(one);
  }
  if (job.device) process.device = job.device->device();
  auto created = Runtime::create(options, std::move(job.control), std::move(job.backends),
                                 process.clock, process_arena(), std::move(job.device));
  if (!process.exit_handler_registered) {
    process.exit_handler_registered = true;
    std::atexit(leave_at_exit);
    ::on_exit(report_exit, nullptr);
  }
  HVD_LOG(kInfo) << "initialised: rank " << topology.rank << " of " << topology.size
                 << ", local rank " << topology.local_rank << " of " << topology.local_size
                 << ", rendezvous " << job.init_method << ", controller " << job.controller << ", "
                 << describe(created->progress_policy(), topology.local_size);
  process.dump_signal.emplace(*created);
  // hvdrun detects the end of a worker of an elastic job and finds its cause.
  if (!options.on_failure)
    process.terminate_handler.emplace(*created, process.program_has_mpi.value_or(false));
  const MutexLock publish(process.mutex);
  process.controller = std::move(job.controller);
  process.init_method = std::move(job.init_method);
  process.runtime = created;
  process.was_initialized.store(true);
  process.reconfigure_failed.store(false);
  return created;
}

}  // namespace

std::shared_ptr<Runtime> current_runtime() {
  auto runtime = runtime_or_null();
  if (!runtime && elastic_options()) {
    if (context().in_elastic_run.load())
      throw PeerLostError("the elastic job is forming a new generation: the last one has ended",
                          -1);
    throw UsageError(
        "this process is a worker of an elastic job, which has no rank and no size before "
        "hvd::elastic::run(); use them, and collectives, in the function of run()");
  }
  if (!runtime && context().reconfigure_failed.load() && !context().job_inherited) {
    throw NotInitializedError(
        "hvd is not initialised any more: the last hvd::reconfigure() failed after the former job "
        "had ended; call it again, with new handles and a new uuid");
  }
  if (!runtime && context().was_initialized.load() && !context().job_inherited) {
    throw NotInitializedError(
        "hvd is not initialised any more: hvd::shutdown() has been called on this rank; call it "
        "after the last use of hvd, also of objects that use it in their destructors");
  }
  if (!runtime && context().job_inherited) {
    throw NotInitializedError(
        "hvd is not initialised in this process, which was made by fork() while its parent was in "
        "a job; only the parent can use the job");
  }
  if (!runtime) throw NotInitializedError("hvd is not initialised; call hvd::init() first");
  return runtime;
}

std::shared_ptr<Runtime> adopt(const RuntimeOptions& options, JobConnection job) {
  Context& process = context();
  const MutexLock lock(process.lifecycle);
  HVD_EXPECT(!runtime_or_null(), "the process has no runtime");
  reserve_descriptors();
  return make_runtime(process, options, std::move(job));
}

void leave_generation() {
  Context& process = context();
  const MutexLock lock(process.lifecycle);
  leave(process, std::nullopt);
  process.neighbours.clear();  // hvdrun tracks when the memory of a generation is free
}

void replace_job(const Options& options, const JoinOther& join_other) {
  Context& process = context();
  const MutexLock lock(process.lifecycle);
  if (elastic::worker_identity() || elastic_options())
    throw UsageError(
        "hvd::reconfigure: this process is a worker of an elastic job, whose members hvdrun "
        "chooses; start it without --min-np and the like");
  auto former = runtime_or_null();
  if (former && controller_of(process) == "mpi")
    throw UsageError(
        "hvd::reconfigure: the job uses MPI, which cannot do without a rank; start the ranks "
        "without MPI, for example by torch.distributed");
  RuntimeOptions resolved = prepare(process, options);
  observe::set_ranks_of_supervisor(false);
  resolved.device_slot = process.device ? process.device : elastic::device_slot();
  // Called below, under the lock.
  const auto leave_former = [&process, &former]() HVD_NO_THREAD_SAFETY_ANALYSIS {
    const auto device = former ? former->device() : nullptr;
    const bool in_job = former != nullptr;
    if (former) {
      former->fail_soon({StatusCode::kShutdown,
                         text("rank ", former->topology().rank,
                              " has left the job in hvd::reconfigure(), which forms another one"),
                         former->topology().rank});
      former.reset();  // it ends below, before anything of the new job is made
      process.reconfigure_failed.store(true);
    }
    leave(process, std::nullopt);
    if (in_job) observe::notify_supervisor(observe::NoticeKind::kOver, 0, "");
    reserve_descriptors();
    FormerPeers peers{.processes = std::exchange(process.neighbours, {}),
                      .memory_lost = process.memory_lost};
    if (device) peers.device_failure = device::find_failure(device, kDeviceTimeout);
    return peers;
  };
  auto job = join_within_limits([&] { return join_other(resolved, leave_former); });
  report_settings(process, options, job.control->topology());
  make_runtime(process, resolved, std::move(job));
}

}  // namespace runtime

namespace {

/// @param store through which the ranks find each other; without one the options and the
/// environment determine the method
void join(runtime::Context& process, const Options& options,
          std::optional<runtime::ProgramStore> store) HVD_REQUIRES(process.lifecycle) {
  if (runtime::runtime_or_null() || runtime::elastic_options())
    throw UsageError(
        "hvd::init: already initialised; call hvd::shutdown() before initialising again");
  const runtime::RuntimeOptions resolved = runtime::prepare(process, options);
  if (elastic::worker_identity()) {
    if (store)
      throw UsageError(
          "hvd::init: a worker of an elastic job joins in hvd::elastic::run(), without "
          "a store of the program");
    const MutexLock publish(process.mutex);
    process.elastic = resolved;
    process.was_initialized.store(true);
    return;
  }
  observe::set_ranks_of_supervisor(true);
  runtime::JobConnection job = runtime::join_observed(resolved, std::move(store));
  runtime::report_settings(process, options, job.control->topology());
  runtime::make_runtime(process, resolved, std::move(job));
}

void join(const Options& options, std::optional<runtime::ProgramStore> store) {
  auto& process = runtime::context();
  const MutexLock lock(process.lifecycle);
  try {
    join(process, options, std::move(store));
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {  // a file system, a socket or the program's store
    throw Error(std::string("hvd::init: ") + error.what());
  }
}

}  // namespace

void init(const Options& options) { join(options, std::nullopt); }

void init(KeyValueStore store, int rank, int world_size, const Options& options) {
  if (!store.set || !store.get || !store.add)
    throw UsageError("hvd::init: the store lacks a function; set, get and add are needed");
  join(options, runtime::ProgramStore{std::move(store), rank, world_size});
}

void use_agent_store(OpenAgentStore open) { runtime::open_agent_store_by(std::move(open)); }

void shutdown() {
  runtime::Context& process = runtime::context();
  if (process.in_elastic_run.load()) {
    throw UsageError(
        "hvd::shutdown: called in the function of hvd::elastic::run(); return from it, and call "
        "shutdown() after run()");
  }
  const MutexLock lock(process.lifecycle);
  {
    const MutexLock elastic(process.mutex);
    process.elastic.reset();
  }
  if (runtime::runtime_or_null()) observe::notify_supervisor(observe::NoticeKind::kLeft, 0, "");
  runtime::leave(process, std::nullopt);
}

void fail(std::string_view cause) noexcept {
  if (const auto runtime = runtime::runtime_or_null()) runtime::report_failure(*runtime, cause);
}

std::shared_ptr<std::byte> allocate_shared(std::size_t bytes) {
  return allocate_shared(runtime::process_arena(), bytes, true);
}

std::byte* allocate_shared_block(std::size_t bytes) noexcept {
  runtime::process_arena();
  SharedArena* const arena = runtime::context().arena.get();
  if (arena != nullptr && arena->inherited()) return nullptr;
  try {
    if (std::byte* const block = arena != nullptr ? arena->allocate(bytes) : nullptr) return block;
    if (!runtime::context().full_reported.exchange(true)) {
      HVD_LOG(kWarning) << "no shared memory for a tensor of " << bytes
                        << " bytes, so it is ordinary memory and will be copied: "
                        << (arena == nullptr
                                ? std::string("the system does not let this process have any "
                                              "(HVD_LOG_LEVEL=debug logs the reason)")
                                : text(arena->used(), " of ", arena->address().capacity,
                                       " bytes are in use, or the system has none left"));
    }
  } catch (const std::bad_alloc&) {  // the arena's own lists did not fit
  }
  return nullptr;
}

bool free_shared_block(void* block) noexcept {
  SharedArena* const arena = runtime::context().arena.get();
  if (arena == nullptr || !arena->offset_of(block, 1)) return false;
  arena->deallocate(static_cast<std::byte*>(block), false);
  return true;
}

void return_shared_pages() noexcept {
  if (const auto& arena = runtime::context().arena) arena->return_pages();
}

std::optional<bool> shared_allocator_setting() noexcept {
  try {
    return env_switch("SHM_ALLOCATOR");
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool has_shared_memory() noexcept { return runtime::process_arena() != nullptr; }

bool is_shared(const void* memory, std::size_t bytes) noexcept {
  const auto arena = runtime::process_arena();
  return arena && arena->offset_of(memory, bytes).has_value();
}

bool is_initialized() noexcept {
  return runtime::runtime_or_null() != nullptr || runtime::elastic_options().has_value();
}

int rank() { return runtime::current_runtime()->topology().rank; }
int size() { return runtime::current_runtime()->topology().size; }
int local_rank() { return runtime::current_runtime()->topology().local_rank; }
int local_size() { return runtime::current_runtime()->topology().local_size; }
int cross_rank() { return runtime::current_runtime()->topology().cross_rank; }
int cross_size() { return runtime::current_runtime()->topology().cross_size; }
std::string init_method() {
  runtime::current_runtime();
  runtime::Context& process = runtime::context();
  const MutexLock lock(process.mutex);
  return process.init_method;
}
std::string controller() {
  runtime::current_runtime();
  return runtime::controller_of(runtime::context());
}
bool is_homogeneous() { return runtime::current_runtime()->topology().homogeneous; }

namespace {

bool built(const char* component) noexcept {
  for (const auto& candidate : runtime::optional_components()) {
    if (std::strcmp(candidate.name, component) == 0) return candidate.built;
  }
  return false;
}

}  // namespace

bool mpi_built() noexcept { return built("MPI"); }
bool cuda_built() noexcept { return built("CUDA"); }
bool nccl_built() noexcept { return built("NCCL"); }
bool shm_built() noexcept { return built("shared memory"); }
bool nccl_available() noexcept { return runtime::nccl_usable(); }
bool mpi_threads_supported() { return runtime::mpi_threads_multiple(); }

std::string build_info() {
  std::string text = "hvd: " + runtime::build_identity() + "\ncompiler: " __VERSION__ "\n";
  for (const auto& component : runtime::optional_components()) {
    text += std::string(component.name) + ": " + (component.built ? "" : "not built: ") +
            component.detail + "\n";
  }
  return text;
}

}  // namespace hvd
