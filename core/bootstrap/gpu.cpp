#include "bootstrap/gpu.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "device/buffers.h"
#include "hvd/error.h"

#if HVD_HAVE_CUDA
#include "device/cuda/cuda_api.h"
#endif
#if HVD_HAVE_NCCL
#include "backend/nccl/launcher.h"
#include "backend/nccl/library.h"
#include "backend/nccl/nccl_backend.h"
#endif

namespace hvd::runtime {
namespace {

/// How long the exit of the process waits for a device that hangs while it frees memory.
constexpr std::chrono::seconds kHelperTimeout{10};

std::shared_ptr<device::Api>& simulated_api() {
  static std::shared_ptr<device::Api> api;
  return api;
}

std::shared_ptr<nccl::Library>& simulated_nccl() {
  static std::shared_ptr<nccl::Library> library;
  return library;
}

/// The functions that a framework has registered to allocate memory of the device. Thread-safe.
struct FrameworkMemory {
  Mutex mutex;
  DeviceMemory functions HVD_GUARDED_BY(mutex);
};

FrameworkMemory& framework_memory() {
  static FrameworkMemory memory;
  return memory;
}

DeviceMemory registered_memory() {
  FrameworkMemory& memory = framework_memory();
  const MutexLock lock(memory.mutex);
  return memory.functions;
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

std::shared_ptr<device::Context> find_device(const RuntimeOptions& options, int local_rank) {
  const auto api = device_api();
  const int count = api ? api->device_count() : 0;
  if (options.device && count == 0) {
    throw UsageError(text("hvd::init: HVD_DEVICE=", *options.device,
                          ": expected a GPU, but this process sees none; unset it, or see "
                          "CUDA_VISIBLE_DEVICES and 'hvdrun --check-build'"));
  }
  if (options.device && *options.device >= count) {
    throw UsageError(text("hvd::init: HVD_DEVICE: expected a GPU below ", count,
                          ", the number that this process sees, got ", *options.device));
  }
  if (count == 0) return nullptr;
  const auto helper = std::make_shared<device::HelperThread>(kHelperTimeout);
  return std::make_shared<device::Context>(
      api, options.device.value_or(options.device_slot.value_or(local_rank) % count),
      device::ContextDeps{.memory = registered_memory(),
                          .run_on_helper = [helper](std::function<void()> function) {
                            helper->run(std::move(function));
                          }});
}

#if HVD_HAVE_NCCL
const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

void find_nccl(Gpu& gpu, RankStatement& statement) {
  std::string reason;
  gpu.nccl = simulated_api() ? simulated_nccl() : nccl::load_library(reason);
  if (simulated_api() && !gpu.nccl) return;
  if (gpu.nccl) {
    statement.nccl_version = gpu.nccl->version();
  } else {
    HVD_LOG(kWarning) << "NCCL cannot be used, GPU tensors go through the host's memory: "
                      << reason;
  }
  const char* const multi = variable("NCCL_MULTI_RANK_GPU_ENABLE");
  if (multi != nullptr && std::string_view(multi) == "1" && statement.nccl_version >= 23000)
    statement.may_share = 1;
  if (const char* const host = variable("NCCL_HOSTID"))
    statement.nccl_host = std::hash<std::string_view>()(host) | 1;  // never 0, which means unset
}
#endif

}  // namespace

Gpu find_gpu(const RuntimeOptions& options, int local_rank, RankStatement& statement) {
  Gpu gpu;
  gpu.device = find_device(options, local_rank);
  if (!gpu.device) return gpu;
  const std::string bus_id = gpu.device->api().info(gpu.device->device()).bus_id;
  bus_id.copy(statement.gpu_bus_id, sizeof statement.gpu_bus_id - 1);
#if HVD_HAVE_NCCL
  find_nccl(gpu, statement);
#endif
  return gpu;
}

void report_unused_gpus(const Agreement& agreement, const RuntimeOptions& options) {
  if (!agreement.gpus_unused) return;
  const bool on_request = options.backend && *options.backend != "nccl";
  const LogLevel level = on_request ? LogLevel::kInfo : LogLevel::kWarning;
  if (level < log_level()) return;
  LogLine(level).stream()
      << "NCCL is not used, and GPU tensors go through the host's memory, because "
      << agreement.reason << "; give every rank a GPU of its own and the same NCCL";
}

std::shared_ptr<Backend> make_nccl_backend(
    const Gpu& gpu, const Agreement& agreement, [[maybe_unused]] const Topology& topology,
    [[maybe_unused]] const std::vector<std::shared_ptr<Backend>>& host_backends,
    const RuntimeOptions& options) {
  if (!gpu.device) return nullptr;
  if (!agreement.nccl) {
    if (options.backend && *options.backend == "nccl")
      throw UsageError("hvd::init: HVD_BACKEND=nccl, but " + agreement.reason);
    return nullptr;
  }
#if HVD_HAVE_NCCL
  // The id of a communicator, and later the splits of an alltoall, are exchanged over a channel of
  // the host backend that is best for an alltoall.
  const nccl::OpenHostChannel open_host = [host_backends, topology](const ChannelSpec& spec,
                                                                    Peers& peers) {
    Collective exchange;
    exchange.kind = OpKind::kAlltoall;
    const auto better = [&](const auto& a, const auto& b) {
      return a->score(topology, spec, exchange) < b->score(topology, spec, exchange);
    };
    return (*std::max_element(host_backends.begin(), host_backends.end(), better))
        ->open(spec, peers);
  };
  nccl::NcclOptions nccl_options;
  nccl_options.init_timeout = options.start_timeout;
  if (options.nccl_register != NcclRegister::kOff)
    nccl_options.registered_bytes = device::fusion_buffer_bytes(options.fusion_threshold);
  const auto library = options.nccl_launch == NcclLaunch::kThread
                           ? nccl::make_launcher(gpu.nccl, gpu.device)
                           : gpu.nccl;
  return std::make_shared<NcclBackend>(library, gpu.device, open_host, nccl_options);
#else
  return nullptr;
#endif
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

void use_device_memory(DeviceMemory functions) {
  FrameworkMemory& memory = framework_memory();
  const MutexLock lock(memory.mutex);
  memory.functions = std::move(functions);
}

void use_device_api(std::shared_ptr<device::Api> api) { simulated_api() = std::move(api); }
void use_nccl_library(std::shared_ptr<nccl::Library> library) {
  simulated_nccl() = std::move(library);
}

}  // namespace hvd::runtime
