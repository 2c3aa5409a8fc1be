#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <span>

#include "backend/nccl/library.h"
#include "base/config.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

/// The first version whose communicators need not block and end in two steps.
constexpr int kOldest = 21800;

/// The first version that aborts the communicators of a group together.
constexpr int kOldestWithGroupedAborts = 22200;

/// The type of ncclCommRevoke, written out because older headers do not have it.
using Revoke = ncclResult_t (*)(ncclComm_t, int flags);
constexpr int kRevokeDefault = 0;  // NCCL_REVOKE_DEFAULT

/// NCCL's functions, looked up when the program runs. Their types come from the header, so that a
/// wrong call does not compile.
struct Functions {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) get_async_error = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclReduce) reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  // Null in versions that do not have them.
  decltype(&ncclMemAlloc) mem_alloc = nullptr;
  decltype(&ncclMemFree) mem_free = nullptr;
  decltype(&ncclCommRegister) comm_register = nullptr;
  decltype(&ncclCommDeregister) comm_deregister = nullptr;
  Revoke comm_revoke = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

/// Finds all functions. Returns the name of a required one that is missing, or an empty text.
std::string find_functions(void* library, Functions& f) {
  const auto need = [&](const char* name, auto& function) {
    return find(library, name, function) ? std::string() : std::string(name);
  };
  for (const std::string& missing :
       {need("ncclGetVersion", f.get_version), need("ncclGetUniqueId", f.get_unique_id),
        need("ncclCommInitRankConfig", f.init), need("ncclCommGetAsyncError", f.get_async_error),
        need("ncclCommFinalize", f.finalize), need("ncclCommDestroy", f.destroy),
        need("ncclCommAbort", f.abort), need("ncclGetErrorString", f.error_string),
        need("ncclGetLastError", f.last_error), need("ncclGroupStart", f.group_start),
        need("ncclGroupEnd", f.group_end), need("ncclAllReduce", f.all_reduce),
        need("ncclBroadcast", f.broadcast), need("ncclReduce", f.reduce),
        need("ncclAllGather", f.all_gather), need("ncclReduceScatter", f.reduce_scatter),
        need("ncclSend", f.send), need("ncclRecv", f.recv)}) {
    if (!missing.empty()) return missing;
  }
  find(library, "ncclMemAlloc", f.mem_alloc);
  find(library, "ncclMemFree", f.mem_free);
  find(library, "ncclCommRegister", f.comm_register);
  find(library, "ncclCommDeregister", f.comm_deregister);
  find(library, "ncclCommRevoke", f.comm_revoke);
  return {};
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

ncclDataType_t type_of(DataType type) {
  switch (type) {
    case DataType::kUInt8:
      return ncclUint8;
    case DataType::kInt8:
      return ncclInt8;
    case DataType::kInt32:
      return ncclInt32;
    case DataType::kInt64:
      return ncclInt64;
    case DataType::kFloat16:
      return ncclFloat16;
    case DataType::kBFloat16:
      return ncclBfloat16;
    case DataType::kFloat32:
      return ncclFloat32;
    case DataType::kFloat64:
      return ncclFloat64;
    default:
      throw Error("NCCL has no " + std::string(to_string(type)));
  }
}

ncclRedOp_t reduction_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return ncclSum;
    case Reduction::kProduct:
      return ncclProd;
    case Reduction::kMin:
      return ncclMin;
    case Reduction::kMax:
      return ncclMax;
    case Reduction::kAverage:
      return ncclAvg;
  }
  throw Error("NCCL has no such reduction");
}

ncclComm_t comm_of(Comm comm) { return static_cast<ncclComm_t>(comm.handle); }
cudaStream_t stream_of(device::Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class NcclLibrary final : public Library {
 public:
  NcclLibrary(const Functions& functions, int version) : f_(functions), version_(version) {}

  int version() const noexcept override { return version_; }

  UniqueId make_id() override {
    ncclUniqueId id = {};
    check(f_.get_unique_id(&id), "ncclGetUniqueId", nullptr);
    UniqueId bytes;
    static_assert(sizeof bytes == sizeof id);
    std::memcpy(bytes.data(), &id, sizeof id);
    return bytes;
  }

  Comm begin_init(const UniqueId& bytes, int size, int rank, Blocking blocking) override {
    ncclUniqueId id;
    std::memcpy(&id, bytes.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking == Blocking::kYes ? 1 : 0;
    ncclComm_t comm = nullptr;
    const ncclResult_t result = f_.init(&comm, size, id, rank, &config);
    const bool failed = result != ncclSuccess && result != ncclInProgress;
    if (failed && (comm == nullptr || blocking == Blocking::kYes)) {
      const std::string text = failure_text(result, "ncclCommInitRankConfig", nullptr);
      if (comm != nullptr) f_.abort(comm);
      throw Error(text);
    }
    return {comm};  // health() reports a failure; the caller aborts the communicator
  }

  Health health(Comm comm) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t answer = f_.get_async_error(comm_of(comm), &state);
    const ncclResult_t result = answer != ncclSuccess && answer != ncclInProgress ? answer : state;
    if (result == ncclSuccess) return {};
    if (result == ncclInProgress) return {Health::State::kBusy};
    const bool remote = result == ncclRemoteError || result == ncclSystemError;
    return {Health::State::kFailed, remote, text_of(result, comm_of(comm))};
  }

  void begin_finalize(Comm comm) override {
    check(f_.finalize(comm_of(comm)), "ncclCommFinalize", comm_of(comm));
  }
  void destroy(Comm comm) noexcept override { f_.destroy(comm_of(comm)); }
  void abort(std::span<const Comm> comms) noexcept override {
    const bool grouped = version_ >= kOldestWithGroupedAborts;
    if (grouped) f_.group_start();
    for (const Comm comm : comms) f_.abort(comm_of(comm));
    if (grouped) f_.group_end();
  }
  bool revoke(Comm comm) noexcept override {
    if (f_.comm_revoke == nullptr) return false;
    const ncclResult_t result = f_.comm_revoke(comm_of(comm), kRevokeDefault);
    return result == ncclSuccess || result == ncclInProgress;
  }

  void begin_group() override { check(f_.group_start(), "ncclGroupStart", nullptr); }
  void end_group() override { check(f_.group_end(), "ncclGroupEnd", nullptr); }

  void all_reduce(const std::byte* in, std::byte* out, std::size_t count, DataType type,
                  Reduction reduction, Comm comm, device::Stream stream) override {
    check(f_.all_reduce(in, out, count, type_of(type), reduction_of(reduction), comm_of(comm),
                        stream_of(stream)),
          "ncclAllReduce", comm_of(comm));
  }
  void broadcast(const std::byte* in, std::byte* out, std::size_t count, DataType type, int root,
                 Comm comm, device::Stream stream) override {
    check(f_.broadcast(in, out, count, type_of(type), root, comm_of(comm), stream_of(stream)),
          "ncclBroadcast", comm_of(comm));
  }
  void reduce(const std::byte* in, std::byte* out, std::size_t count, DataType type,
              Reduction reduction, int root, Comm comm, device::Stream stream) override {
    check(f_.reduce(in, out, count, type_of(type), reduction_of(reduction), root, comm_of(comm),
                    stream_of(stream)),
          "ncclReduce", comm_of(comm));
  }
  void all_gather(const std::byte* in, std::byte* out, std::size_t count, DataType type, Comm comm,
                  device::Stream stream) override {
    check(f_.all_gather(in, out, count, type_of(type), comm_of(comm), stream_of(stream)),
          "ncclAllGather", comm_of(comm));
  }
  void reduce_scatter(const std::byte* in, std::byte* out, std::size_t count, DataType type,
                      Reduction reduction, Comm comm, device::Stream stream) override {
    check(f_.reduce_scatter(in, out, count, type_of(type), reduction_of(reduction), comm_of(comm),
                            stream_of(stream)),
          "ncclReduceScatter", comm_of(comm));
  }
  void send(const std::byte* in, std::size_t count, DataType type, int peer, Comm comm,
            device::Stream stream) override {
    check(f_.send(in, count, type_of(type), peer, comm_of(comm), stream_of(stream)), "ncclSend",
          comm_of(comm));
  }
  void receive(std::byte* out, std::size_t count, DataType type, int peer, Comm comm,
               device::Stream stream) override {
    check(f_.recv(out, count, type_of(type), peer, comm_of(comm), stream_of(stream)), "ncclRecv",
          comm_of(comm));
  }

  bool has_registration() const noexcept override {
    return f_.mem_alloc != nullptr && f_.mem_free != nullptr && f_.comm_register != nullptr &&
           f_.comm_deregister != nullptr;
  }
  std::byte* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(f_.mem_alloc(&memory, bytes), "ncclMemAlloc", nullptr);
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory) noexcept override { f_.mem_free(memory); }
  void* register_buffer(Comm comm, std::byte* memory, std::size_t bytes) override {
    void* registration = nullptr;
    check(f_.comm_register(comm_of(comm), memory, bytes, &registration), "ncclCommRegister",
          comm_of(comm));
    if (registration == nullptr)
      throw Error("NCCL " + version_text(version_) +
                  ": ncclCommRegister returned no registration (is NCCL_LOCAL_REGISTER=0 set?)");
    return registration;
  }
  void deregister_buffer(Comm comm, void* registration) noexcept override {
    f_.comm_deregister(comm_of(comm), registration);
  }

 private:
  std::string text_of(ncclResult_t result, ncclComm_t comm) const {
    const char* const last = f_.last_error(comm);
    return std::string(f_.error_string(result)) +
           (last != nullptr && *last != '\0' ? std::string(": ") + last : std::string());
  }
  std::string failure_text(ncclResult_t result, const char* call, ncclComm_t comm) const {
    return "NCCL " + version_text(version_) + ": " + call + " failed: " + text_of(result, comm);
  }
  void check(ncclResult_t result, const char* call, ncclComm_t comm) const {
    if (result != ncclSuccess && result != ncclInProgress)
      throw Error(failure_text(result, call, comm));
  }

  const Functions f_;
  const int version_;
};

struct Loaded {
  void* handle = nullptr;
  std::string name = {};
};

/// Opens the first NCCL that exists, in the order of load_library().
Loaded open_library(std::string& reason) {
  if (const auto named = env_string("NCCL_LIBRARY")) {
    if (void* const handle = dlopen(named->c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, *named};
    reason = "HVD_NCCL_LIBRARY: " + std::string(dlerror());
    return {};
  }
  // Reuse a loaded NCCL, because a second one would have its own communicators, threads and memory.
  // A LibTorch that contains a static NCCL exports its functions and loads no libnccl.so.2.
  if (dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig") != nullptr)
    return {dlopen(nullptr, RTLD_NOW), "already in the process"};
  if (void* const handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD))
    return {handle, "libnccl.so.2, already loaded"};
  for (const char* const name : {"libnccl.so.2", HVD_NCCL_BUILT_WITH}) {
    if (void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return {handle, name};
    reason = dlerror();
  }
  return {};
}

std::shared_ptr<NcclLibrary> load(std::string& reason, std::string& name) {
  const Loaded loaded = open_library(reason);  // never closed, because NCCL has threads
  if (loaded.handle == nullptr) return nullptr;
  name = loaded.name;
  Functions functions;
  const std::string missing = find_functions(loaded.handle, functions);
  int version = 0;
  if (missing.empty() && functions.get_version(&version) == ncclSuccess && version >= kOldest) {
    return std::make_shared<NcclLibrary>(functions, version);
  }
  reason = name + ": expected NCCL " + version_text(kOldest) + " or newer, got " +
           (missing.empty() ? version_text(version) : "a library without " + missing);
  return nullptr;
}

}  // namespace

std::shared_ptr<Library> load_library(std::string& reason) {
  std::string name;
  return load(reason, name);
}

std::string describe_library() {
  std::string reason;
  std::string name;
  const auto library = load(reason, name);
  return library ? version_text(library->version()) + " (" + name + ")" : "not usable: " + reason;
}

}  // namespace hvd::nccl
