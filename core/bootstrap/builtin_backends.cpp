// The one file that knows at compile time what is in the build.
#include "bootstrap/builtin_backends.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/self/self_backend.h"
#include "backend/shm/shm_backend.h"
#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bootstrap/build_identity.h"
#include "bootstrap/data_neighbours.h"
#include "bootstrap/gpu_agreement.h"
#include "bootstrap/init_method.h"
#include "bootstrap/join_ucx.h"
#include "bootstrap/mpi_module.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/settings_agreement.h"
#include "bootstrap/store_rendezvous.h"
#include "device/buffers.h"
#include "hvd/error.h"
#include "transport/message_control_plane.h"
#include "transport/node/node.h"
#include "transport/self_control_plane.h"
#include "transport/ucx/ucx_library.h"

#if HVD_HAVE_CUDA
#include "device/cuda/cuda_api.h"
#endif
#if HVD_HAVE_NCCL
#include "backend/nccl/launcher.h"
#include "backend/nccl/nccl_backend.h"
#include "backend/nccl/nccl_library.h"
#endif

namespace hvd::runtime {
namespace {

/// For a device that does not return from freeing memory at the end.
constexpr std::chrono::seconds kHelperPatience{10};

#if HVD_HAVE_NCCL
const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}
#endif

std::shared_ptr<device::Api>& simulated_api() {
  static std::shared_ptr<device::Api> api;
  return api;
}

std::shared_ptr<nccl::Library>& simulated_nccl() {
  static std::shared_ptr<nccl::Library> library;
  return library;
}

/// What a framework has given to the process. Thread-safe.
template <typename Value>
class Given {
 public:
  Value get() {
    const MutexLock lock(mutex_);
    return value_;
  }
  void set(Value other) {
    const MutexLock lock(mutex_);
    value_ = std::move(other);
  }

 private:
  Mutex mutex_;
  Value value_ HVD_GUARDED_BY(mutex_);
};

Given<DeviceMemory>& frameworks_memory() {
  static Given<DeviceMemory> memory;
  return memory;
}

Given<OpenAgentStore>& agent_store() {
  static Given<OpenAgentStore> open;
  return open;
}

/// The process's GPUs; null in a build without them.
std::shared_ptr<device::Api> device_api() {
  if (simulated_api()) return simulated_api();
#if HVD_HAVE_CUDA
  static const std::shared_ptr<device::Api> api = device::make_cuda_api();
  return api;
#else
  return nullptr;
#endif
}

/// This rank's GPU: nothing is done with it before its first use. @throws UsageError for an
/// HVD_DEVICE that is not there.
std::shared_ptr<device::Context> find_gpu(const RuntimeOptions& options, int local_rank) {
  const auto api = device_api();
  const int count = api ? api->device_count() : 0;
  if (options.device && count == 0) {
    throw UsageError("hvd::init: HVD_DEVICE=" + std::to_string(*options.device) +
                     ": expected a GPU, but this process sees none; unset it, or see "
                     "CUDA_VISIBLE_DEVICES and 'hvdrun --check-build'");
  }
  if (options.device && *options.device >= count) {
    throw UsageError("hvd::init: HVD_DEVICE: expected a GPU below " + std::to_string(count) +
                     ", the number that this process sees, got " + std::to_string(*options.device));
  }
  if (count == 0) return nullptr;
  const auto helper = std::make_shared<device::HelperThread>(kHelperPatience);
  return std::make_shared<device::Context>(
      api, options.device.value_or(local_rank % count),
      device::Surroundings{.memory = frameworks_memory().get(),
                           .run_aside = [helper](std::function<void()> function) {
                             helper->run(std::move(function));
                           }});
}

/// A GPU and what goes with it, until the ranks have agreed on what to do with theirs.
struct Gpu {
  std::shared_ptr<device::Context> device;
  GpuReport report;
#if HVD_HAVE_NCCL
  std::shared_ptr<nccl::Library> nccl;
#endif
};

Gpu inspect_gpu(const RuntimeOptions& options, int local_rank) {
  Gpu gpu;
  gpu.device = find_gpu(options, local_rank);
  if (!gpu.device) return gpu;
  const std::string bus_id = gpu.device->api().info(gpu.device->device()).bus_id;
  bus_id.copy(gpu.report.bus_id, sizeof gpu.report.bus_id - 1);
#if HVD_HAVE_NCCL
  std::string reason;
  gpu.nccl = simulated_api() ? simulated_nccl() : nccl::load_library(reason);
  if (simulated_api() && !gpu.nccl) return gpu;
  if (gpu.nccl) {
    gpu.report.nccl_version = gpu.nccl->version();
  } else {
    HVD_LOG(kWarning) << "NCCL cannot be used, GPU tensors go through the host's memory: "
                      << reason;
  }
  const char* const multi = variable("NCCL_MULTI_RANK_GPU_ENABLE");
  if (multi != nullptr && std::string_view(multi) == "1" && gpu.report.nccl_version >= 23000)
    gpu.report.may_share = 1;
  if (const char* const host = variable("NCCL_HOSTID"))
    gpu.report.nccl_host = std::hash<std::string_view>()(host) | 1;  // never 0, which means unset
#endif
  return gpu;
}

/// Logs on rank 0 that tensors on GPUs are staged through the host's memory, which is many times
/// slower than NCCL. A warning, unless the program has asked for another backend.
void report_unused_gpus(const GpuAgreement& agreement, const RuntimeOptions& options) {
  if (!agreement.gpus_unused) return;
  const bool on_request = options.backend && *options.backend != "nccl";
  const LogLevel level = on_request ? LogLevel::kInfo : LogLevel::kWarning;
  if (level < log_level()) return;
  LogLine(level).stream()
      << "NCCL is not used, and GPU tensors go through the host's memory, because "
      << agreement.reason << "; give every rank a GPU of its own and the same NCCL";
}

/// Adds the backend for GPUs if all ranks can use it.
void add_device_backends(JobConnection& job, const Gpu& gpu, const GpuAgreement& agreement,
                         const RuntimeOptions& options) {
  job.device = gpu.device;
  if (!job.device) return;
  if (!agreement.nccl) {
    if (options.backend && *options.backend == "nccl")
      throw UsageError("hvd::init: HVD_BACKEND=nccl, but " + agreement.reason);
    return;
  }
#if HVD_HAVE_NCCL
  const Topology topology = job.control->topology();
  // The id of a communicator, and later the splits of an alltoall, go over the best channel for the
  // host's memory that has both.
  const nccl::OpenHostChannel open_host = [backends = job.backends, topology](
                                              const ChannelSpec& spec, Peers& peers) {
    Collective exchange;
    exchange.kind = OpKind::kAlltoall;
    const auto better = [&](const auto& a, const auto& b) {
      return a->score(topology, spec, exchange) < b->score(topology, spec, exchange);
    };
    return (*std::max_element(backends.begin(), backends.end(), better))->open(spec, peers);
  };
  nccl::NcclOptions nccl_options;
  nccl_options.init_timeout = options.start_timeout;
  if (options.nccl_register != NcclRegister::kOff)
    nccl_options.registered_bytes = device::fusion_buffer_bytes(options.fusion_threshold);
  nccl_options.windows = options.nccl_register == NcclRegister::kWindow;
  const auto library = options.nccl_launch == NcclLaunch::kThread
                           ? nccl::make_launcher(gpu.nccl, gpu.device)
                           : gpu.nccl;
  job.backends.push_back(
      std::make_shared<NcclBackend>(library, gpu.device, open_host, nccl_options));
#endif
}

JobConnection job_of_one(const RuntimeOptions& options) {
  JobConnection job;
  job.control = control::make_self_control_plane();
  job.backends.push_back(std::make_shared<SelfBackend>());
  const Gpu gpu = inspect_gpu(options, 0);
  add_device_backends(job, gpu, agree_on_gpus({&gpu.report, 1}, job.control->topology()), options);
  return job;
}

/// The ranks of a host decide the same, as they look at the same numbers.
bool room_for_shm(const host::Node& node) {
  const Topology& topology = node.topology();
  const std::size_t wanted = ShmBackend::wanted_shared_memory(topology.local_size);
  const std::uint64_t free = node.shared_memory_free(topology.rank);
  if (topology.local_size < 2 || free >= wanted) return true;
  if (topology.local_rank == 0) {
    HVD_LOG(kWarning)
        << "/dev/shm has " << free << " bytes left, expected " << wanted
        << " for the shm backend; using messages between the ranks of this host, which "
           "is slower (docker: --shm-size)";
  }
  return false;
}

/// All ranks decide the same, as they look at the same numbers: one host without room is enough to
/// do without.
bool room_for_hierarchical(const host::Node& node) {
  const Topology& topology = node.topology();
  if (topology.host_names.size() < 2 || !node.all_control_segments_shared()) return false;
  std::vector<int> ranks_of_host(topology.host_names.size(), 0);
  for (const int host : topology.host_of_rank) ++ranks_of_host[static_cast<std::size_t>(host)];
  for (int rank = 0; rank < topology.size; ++rank) {
    const int local_size = ranks_of_host[static_cast<std::size_t>(
        topology.host_of_rank[static_cast<std::size_t>(rank)])];
    if (local_size < 2) continue;
    const std::size_t wanted = ShmBackend::wanted_shared_memory(local_size) +
                               hierarchical::HierarchicalBackend::wanted_shared_memory(local_size);
    if (node.shared_memory_free(rank) >= wanted) continue;
    if (topology.rank == 0) {
      HVD_LOG(kWarning) << "/dev/shm of " << topology.host_name(rank) << " has "
                        << node.shared_memory_free(rank) << " bytes left, expected " << wanted
                        << " for the hierarchical backend; using messages between all ranks of "
                           "process sets on several hosts, "
                        << "which is slower (docker: --shm-size)";
    }
    return false;
  }
  return true;
}

// Before the job is joined: a rank that leaves again right after joining would keep the others
// waiting.
void check_backend_name(const RuntimeOptions& options, const InitMethod& method) {
  if (!options.backend) return;
  const std::string own = name_of(method.controller);
  const bool carriers = *options.backend == "mpi" || *options.backend == "ucx";
  if (carriers && method.controller != Controller::kLocal && *options.backend != own) {
    throw UsageError("hvd::init: backend (HVD_BACKEND): '" + *options.backend +
                     "' in a job whose messages travel over " + own + " (init method " +
                     method.place + "); ask for '" + own +
                     "', leave it unset, or start the ranks with 'hvdrun --controller " +
                     *options.backend + "'");
  }
  std::string known;
  for (const std::string_view name : backend_names()) {
    if (name == *options.backend) return;
    known += (known.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  throw UsageError("hvd::init: backend (HVD_BACKEND): expected one of " + known + ", got '" +
                   *options.backend + "'");
}

MpiModule& require_mpi(const InitMethod& method) {
  std::string reason;
  if (MpiModule* const module = mpi_module(&reason)) return *module;
  throw UsageError("hvd::init: " + method.source +
                   (method.place == method.source ? "" : " asks for MPI (" + method.place + ")") +
                   ", but hvd's part for MPI cannot be loaded: " + reason +
                   "; install MPI and build hvd with it (HVD_WITH_MPI), or start the ranks without "
                   "MPI: 'hvdrun --controller ucx'");
}

std::shared_ptr<World> join_over_mpi(const RuntimeOptions& options, const InitMethod& method) {
  MpiJoinOptions join;
  join.start_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.start_timeout);
  // A thread that is inside a call may be without a core for a while, so not less than a second.
  join.call_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::max<Duration>(options.peer_timeout / 2, std::chrono::seconds(1)));
  return require_mpi(method).join(join);
}

/// The port is the agent's, so rank 0 cannot serve it.
KeyValueStore agent_store(const InitMethod& method, std::chrono::milliseconds timeout) {
  const OpenAgentStore open = agent_store().get();
  if (open) return open(method.host, method.port, timeout);
  throw UsageError("hvd::init: torchrun's agent serves " + method.host + ":" +
                   std::to_string(method.port) +
                   " (TORCHELASTIC_USE_AGENT_STORE=True), whose protocol a program without "
                   "hvd::torch does not speak; link hvd::torch, or set HVD_INIT_METHOD to "
                   "tcp://HOST:PORT with another port on the host of rank 0, or to file:///path");
}

std::shared_ptr<World> join_world(const RuntimeOptions& options, const InitMethod& method,
                                  std::optional<ProgramStore> store) {
  if (method.controller == Controller::kMpi) return join_over_mpi(options, method);
  const Deadline deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(options.start_timeout);
  const rendezvous::Introduction own{.job = env_string("JOB_NAME").value_or(""),
                                     .token = env_string("JOB_TOKEN").value_or(""),
                                     .build = build_identity(),
                                     .rank = method.rank,
                                     .size = method.size};
  if (store)
    return join_over_ucx(rendezvous::meet_in_store(std::move(store->store), own, deadline),
                         deadline);
  if (method.agent_store) {
    const auto timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(options.start_timeout);
    return join_over_ucx(rendezvous::meet_in_store(agent_store(method, timeout), own, deadline),
                         deadline);
  }
  return join_over_ucx(rendezvous::meet(method.place, own, deadline), deadline);
}

/// Over UCX an allreduce of 1 MiB between two hosts takes 0.6 to 0.75 of its time where the tensor
/// is sent whole. Over MPI it takes longer, by a tenth there and by a sixth on one host.
flat::FlatTuning tuning_for(const message::Carrier& carrier) {
  flat::FlatTuning tuning;
  if (carrier.name() == name_of(Controller::kUcx)) tuning.direct_pair_bytes = std::size_t{1} << 20;
  return tuning;
}

/// What the ranks of a job have told each other, and what has been made of it.
void begin(JobConnection& job, World& world, const RuntimeOptions& options,
           std::shared_ptr<const SharedArena> arena) {
  const auto& carrier = world.carrier();
  const auto& node = world.node();
  const Topology& topology = node->topology();
  job.control = message::make_control_plane(carrier, node);
  const auto contradiction = job.controller == name_of(Controller::kMpi)
                                 ? contradiction_to_mpi(options, topology.rank, topology.size)
                                 : std::nullopt;
  if (contradiction) {
    job.control->farewell();
    throw UsageError(*contradiction);
  }
  const SettingsReport settings = report_of(options);
  std::vector<SettingsReport> all_settings(static_cast<std::size_t>(topology.size));
  world.allgather(&settings, all_settings.data(), sizeof settings);
  if (const auto difference = find_different_setting(all_settings, topology)) {
    job.control->farewell();
    throw UsageError("hvd::init: " + *difference);
  }
  Gpu gpu = inspect_gpu(options, topology.local_rank);
  std::vector<GpuReport> reports(static_cast<std::size_t>(topology.size));
  world.allgather(&gpu.report, reports.data(), sizeof gpu.report);
  const GpuAgreement agreement = agree_on_gpus(reports, topology);
  if (topology.rank == 0) report_unused_gpus(agreement, options);
  job.backends.push_back(std::make_shared<flat::FlatBackend>(carrier, tuning_for(*carrier)));
  if (node->control_segment_shared() && room_for_shm(*node))
    job.backends.push_back(std::make_shared<ShmBackend>(node->name_prefix(), std::move(arena)));
  if (room_for_hierarchical(*node))
    job.backends.push_back(std::make_shared<hierarchical::HierarchicalBackend>(carrier, node));
  // For process sets of one rank, whatever the size of the job.
  job.backends.push_back(std::make_shared<SelfBackend>());
  add_device_backends(job, gpu, agreement, options);
  for (const int rank : data_neighbours(topology)) carrier->connect(message::Plane::kData, rank);
  world.begun();
}

}  // namespace

JobConnection join_job(const RuntimeOptions& options, std::shared_ptr<const SharedArena> arena,
                       std::optional<ProgramStore> store) {
  const MpiModule* const mpi = mpi_module_in_use();
  const InitMethod method =
      store ? method_of_store(options, store->store.name, store->rank, store->size)
            : choose_init_method(options, mpi != nullptr && mpi->active());
  check_backend_name(options, method);
  if (method.controller == Controller::kLocal) return job_of_one(options);
  const auto world = join_world(options, method, std::move(store));
  JobConnection job;
  job.world = world;
  job.controller = name_of(method.controller);
  job.init_method = world->init_method();
  try {
    begin(job, *world, options, std::move(arena));
  } catch (const std::exception& error) {
    world->abandon(error);
    throw;
  }
  return job;
}

bool mpi_threads_multiple() {
  const MpiModule* const mpi = mpi_module_in_use();
  return mpi == nullptr || !mpi->active() || mpi->threads_multiple();
}

bool mpi_is_active() noexcept {
  const MpiModule* const mpi = mpi_module_in_use();
  return mpi != nullptr && mpi->active();
}

void forget_job_peers() noexcept {
  if (MpiModule* const mpi = mpi_module_in_use()) mpi->forget_peers();
}

void open_agent_store_by(OpenAgentStore open) { agent_store().set(std::move(open)); }
void use_device_memory(DeviceMemory memory) { frameworks_memory().set(std::move(memory)); }
void use_device_api(std::shared_ptr<device::Api> api) { simulated_api() = std::move(api); }
void use_nccl_library(std::shared_ptr<nccl::Library> library) {
  simulated_nccl() = std::move(library);
}

std::vector<std::string_view> backend_names() {
  return {
      "self", "shm", "hierarchical", "mpi",
#if HVD_HAVE_UCX
      "ucx",
#endif
#if HVD_HAVE_NCCL
      "nccl",
#endif
  };
}

bool nccl_usable() noexcept {
#if HVD_HAVE_NCCL
  try {
    std::string reason;
    return device_api()->device_count() > 0 && nccl::load_library(reason) != nullptr;
  } catch (const std::exception&) {
    return false;
  }
#else
  return false;
#endif
}

namespace {

std::vector<Component> mpi_components() {
  std::string reason;
  const MpiModule* const mpi = mpi_module(&reason);
  if (mpi == nullptr) return {{"MPI", false, reason}};
  return {{"MPI", true, mpi->library_version()}};
}

}  // namespace

std::vector<Component> optional_components() {
  std::vector<Component> components = mpi_components();
  components.insert(components.end(), {
#if HVD_HAVE_UCX
                                          {"UCX", true, ucx::describe_library()},
#else
                                          {"UCX", false, "HVD_WITH_UCX=OFF, or there was no ucp.h"},
#endif
                                          {"shared memory", true, "POSIX shared memory"},
#if HVD_HAVE_CUDA
                                          {"CUDA", true, device::describe_cuda()},
#else
                                          {"CUDA", false,
                                           "HVD_WITH_CUDA=OFF, or there was no nvcc"},
#endif
#if HVD_HAVE_NCCL
                                          {"NCCL", true, nccl::describe_library()},
#else
                                          {"NCCL", false, "HVD_WITH_NCCL=OFF, or there was none"},
#endif
                                      });
  return components;
}

}  // namespace hvd::runtime
