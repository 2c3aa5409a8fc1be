#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <span>

#include "backend/nccl/library.h"
#include "base/config.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

/// The first version that has non-blocking communicators and ncclCommFinalize().
constexpr int kOldest = 21800;

/// The first version that aborts the communicators of a group together.
constexpr int kOldestWithGroupedAborts = 22200;

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
  // The type is written out, because older headers do not declare the function.
  ncclResult_t (*comm_revoke)(ncclComm_t, int flags) = nullptr;
};

/// Finds all functions. Returns the name of the first required one that is missing, or an empty
/// text.
std::string find_functions(void* library, Functions& f) {
  std::string missing;
  const auto look_up = [&]<class Function>(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  };
  const auto need = [&](const char* name, auto& function) {
    if (!look_up(name, function) && missing.empty()) missing = name;
  };
  need("ncclGetVersion", f.get_version);
  need("ncclGetUniqueId", f.get_unique_id);
  need("ncclCommInitRankConfig", f.init);
  need("ncclCommGetAsyncError", f.get_async_error);
  need("ncclCommFinalize", f.finalize);
  need("ncclCommDestroy", f.destroy);
  need("ncclCommAbort", f.abort);
  need("ncclGetErrorString", f.error_string);
  need("ncclGetLastError", f.last_error);
  need("ncclGroupStart", f.group_start);
  need("ncclGroupEnd", f.group_end);
  need("ncclAllReduce", f.all_reduce);
  need("ncclBroadcast", f.broadcast);
  need("ncclReduce", f.reduce);
  need("ncclAllGather", f.all_gather);
  need("ncclReduceScatter", f.reduce_scatter);
  need("ncclSend", f.send);
  need("ncclRecv", f.recv);
  look_up("ncclMemAlloc", f.mem_alloc);
  look_up("ncclMemFree", f.mem_free);
  look_up("ncclCommRegister", f.comm_register);
  look_up("ncclCommDeregister", f.comm_deregister);
  look_up("ncclCommRevoke", f.comm_revoke);
  return missing;
}

std::string version_text(int version) {
  return text(version / 10000, ".", version / 100 % 100, ".", version % 100);
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
      throw Error(text("NCCL has no ", to_string(type)));
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
      const std::string failure = failure_text(result, "ncclCommInitRankConfig", nullptr);
      if (comm != nullptr) f_.abort(comm);
      throw Error(failure);
    }
    return {comm};  // health() reports a failure; the caller aborts the communicator
  }

  Health health(Comm comm) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t answer = f_.get_async_error(comm_of(comm), &state);
    const ncclResult_t result = answer != ncclSuccess && answer != ncclInProgress ? answer : state;
    if (result == ncclSuccess) return {};
    if (result == ncclInProgress) return {CommState::kBusy};
    const bool remote = result == ncclRemoteError || result == ncclSystemError;
    return {CommState::kFailed, remote, text_of(result, comm_of(comm))};
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

  void launch(const Call& call, Comm comm_handle, device::Stream stream_handle) override {
    const ncclDataType_t type = type_of(call.type);
    const ncclRedOp_t reduction = reduction_of(call.reduction);
    const ncclComm_t comm = comm_of(comm_handle);
    const cudaStream_t stream = stream_of(stream_handle);
    switch (call.kind) {
      case Call::Kind::kAllReduce:
        return check(f_.all_reduce(call.in, call.out, call.count, type, reduction, comm, stream),
                     "ncclAllReduce", comm);
      case Call::Kind::kBroadcast:
        return check(f_.broadcast(call.in, call.out, call.count, type, call.peer, comm, stream),
                     "ncclBroadcast", comm);
      case Call::Kind::kReduce:
        return check(
            f_.reduce(call.in, call.out, call.count, type, reduction, call.peer, comm, stream),
            "ncclReduce", comm);
      case Call::Kind::kAllGather:
        return check(f_.all_gather(call.in, call.out, call.count, type, comm, stream),
                     "ncclAllGather", comm);
      case Call::Kind::kReduceScatter:
        return check(
            f_.reduce_scatter(call.in, call.out, call.count, type, reduction, comm, stream),
            "ncclReduceScatter", comm);
      case Call::Kind::kSend:
        return check(f_.send(call.in, call.count, type, call.peer, comm, stream), "ncclSend", comm);
      case Call::Kind::kReceive:
        return check(f_.recv(call.out, call.count, type, call.peer, comm, stream), "ncclRecv",
                     comm);
    }
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
      throw Error(text("NCCL ", version_text(version_),
                       ": ncclCommRegister returned no registration ",
                       "(is NCCL_LOCAL_REGISTER=0 set?)"));
    return registration;
  }
  void deregister_buffer(Comm comm, void* registration) noexcept override {
    f_.comm_deregister(comm_of(comm), registration);
  }

 private:
  std::string text_of(ncclResult_t result, ncclComm_t comm) const {
    const char* const last = f_.last_error(comm);
    const bool has_detail = last != nullptr && *last != '\0';
    return text(f_.error_string(result), has_detail ? ": " : "", has_detail ? last : "");
  }
  std::string failure_text(ncclResult_t result, const char* call, ncclComm_t comm) const {
    return text("NCCL ", version_text(version_), ": ", call, " failed: ", text_of(result, comm));
  }
  void check(ncclResult_t result, const char* call, ncclComm_t comm) const {
    if (result != ncclSuccess && result != ncclInProgress)
      throw Error(failure_text(result, call, comm));
  }

  const Functions f_;
  const int version_;
};

/// Opens the first NCCL that exists, in the order of load_library(). Returns null and sets the
/// reason if there is none.
void* open_library(std::string& name, std::string& reason) {
  if (const auto named = env_string("NCCL_LIBRARY")) {
    name = *named;
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) reason = text("HVD_NCCL_LIBRARY: ", dlerror());
    return handle;
  }
  // Reuse a loaded NCCL, because a second one would have its own communicators, threads and memory.
  // A LibTorch that contains a static NCCL exports its functions and loads no libnccl.so.2.
  name = "already in the process";
  if (dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig") != nullptr) return dlopen(nullptr, RTLD_NOW);
  name = "libnccl.so.2, already loaded";
  if (void* const handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD))
    return handle;
  for (const char* const file : {"libnccl.so.2", HVD_NCCL_BUILT_WITH}) {
    name = file;
    if (void* const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return handle;
    reason = dlerror();
  }
  return nullptr;
}

std::shared_ptr<NcclLibrary> load(std::string& name, std::string& reason) {
  void* const handle = open_library(name, reason);  // never closed, because NCCL starts threads
  if (handle == nullptr) return nullptr;
  Functions functions;
  const std::string missing = find_functions(handle, functions);
  int version = 0;
  if (missing.empty() && functions.get_version(&version) == ncclSuccess && version >= kOldest)
    return std::make_shared<NcclLibrary>(functions, version);
  reason = text(name, ": expected NCCL ", version_text(kOldest), " or newer, got ",
                missing.empty() ? version_text(version) : text("a library without ", missing));
  return nullptr;
}

}  // namespace

std::shared_ptr<Library> load_library(std::string& reason) {
  std::string name;
  return load(name, reason);
}

std::string describe_library() {
  std::string reason;
  std::string name;
  const auto library = load(name, reason);
  return library ? text(version_text(library->version()), " (", name, ")")
                 : text("not usable: ", reason);
}

}  // namespace hvd::nccl
