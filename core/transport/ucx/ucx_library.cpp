#include "transport/ucx/worker.h"

#include <dlfcn.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "base/limits.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "base/thread_signals.h"
#include "hvd/error.h"
#include "transport/ucx/ucx_descriptors.h"
#include "transport/ucx/ucx_settings.h"
#include "transport/ucx/ucx_shortage.h"

namespace hvd::ucx {
namespace {

/// Enough for four workers on a host with several interfaces. UCX 1.13 ends the process at some
/// places if it cannot get a descriptor.
constexpr std::size_t kDescriptors = 64;

constexpr unsigned kOldestMajor = 1;
constexpr unsigned kOldestMinor = 13;

static_assert(kOk == UCS_OK && kInProgress == UCS_INPROGRESS &&
              kTruncated == UCS_ERR_MESSAGE_TRUNCATED && kCancelled == UCS_ERR_CANCELED);
static_assert(sizeof(ucp_tag_t) == sizeof(message::Tag));

/// UCX's functions, looked up at run time. Their types are taken from UCX's header, so that the
/// compiler checks the calls.
struct Functions {
  decltype(&ucp_get_version) get_version = nullptr;
  decltype(&ucp_init_version) init = nullptr;
  decltype(&ucp_cleanup) cleanup = nullptr;
  decltype(&ucp_config_read) config_read = nullptr;
  decltype(&ucp_config_modify) config_modify = nullptr;
  decltype(&ucp_config_release) config_release = nullptr;
  decltype(&ucp_worker_create) worker_create = nullptr;
  decltype(&ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&ucp_worker_get_address) get_address = nullptr;
  decltype(&ucp_worker_release_address) release_address = nullptr;
  decltype(&ucp_worker_progress) progress = nullptr;
  decltype(&ucp_ep_create) ep_create = nullptr;
  decltype(&ucp_ep_close_nbx) ep_close = nullptr;
  decltype(&ucp_tag_send_nbx) tag_send = nullptr;
  decltype(&ucp_tag_recv_nbx) tag_recv = nullptr;
  decltype(&ucp_dt_create_generic) create_datatype = nullptr;
  decltype(&ucp_dt_destroy) destroy_datatype = nullptr;
  decltype(&ucp_tag_msg_recv_nbx) tag_msg_recv = nullptr;
  decltype(&ucp_tag_probe_nb) tag_probe = nullptr;
  decltype(&ucp_tag_recv_request_test) recv_test = nullptr;
  decltype(&ucp_request_check_status) check_status = nullptr;
  decltype(&ucp_request_cancel) cancel = nullptr;
  decltype(&ucp_request_free) free = nullptr;
  decltype(&ucs_status_string) status_string = nullptr;
  decltype(&ucs_log_push_handler) push_log_handler = nullptr;
};

/// Returns the name of the first function that is missing; empty if all were found.
std::string find_functions(void* library, Functions& f) {
  std::string missing;
  const auto need = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  need("ucp_get_version", f.get_version);
  need("ucp_init_version", f.init);
  need("ucp_cleanup", f.cleanup);
  need("ucp_config_read", f.config_read);
  need("ucp_config_modify", f.config_modify);
  need("ucp_config_release", f.config_release);
  need("ucp_worker_create", f.worker_create);
  need("ucp_worker_destroy", f.worker_destroy);
  need("ucp_worker_get_address", f.get_address);
  need("ucp_worker_release_address", f.release_address);
  need("ucp_worker_progress", f.progress);
  need("ucp_ep_create", f.ep_create);
  need("ucp_ep_close_nbx", f.ep_close);
  need("ucp_tag_send_nbx", f.tag_send);
  need("ucp_tag_recv_nbx", f.tag_recv);
  need("ucp_dt_create_generic", f.create_datatype);
  need("ucp_dt_destroy", f.destroy_datatype);
  need("ucp_tag_msg_recv_nbx", f.tag_msg_recv);
  need("ucp_tag_probe_nb", f.tag_probe);
  need("ucp_tag_recv_request_test", f.recv_test);
  need("ucp_request_check_status", f.check_status);
  need("ucp_request_cancel", f.cancel);
  need("ucp_request_free", f.free);
  // These are in libucs, which libucp depends on, so dlsym() searches it too.
  need("ucs_status_string", f.status_string);
  need("ucs_log_push_handler", f.push_log_handler);
  return missing;
}

std::string version_text(unsigned major, unsigned minor, unsigned patch) {
  return text(major, ".", minor, ".", patch);
}

/// UCX often logs the end of a peer as an error. hvd reports it itself, so it is logged as kInfo
/// only.
LogLevel level_of(ucs_log_level_t level) noexcept {
  if (level <= UCS_LOG_LEVEL_FATAL) return LogLevel::kError;
  if (level <= UCS_LOG_LEVEL_ERROR) return LogLevel::kInfo;
  return level <= UCS_LOG_LEVEL_INFO ? LogLevel::kDebug : LogLevel::kTrace;
}

ucs_log_func_rc_t pass_on_log(const char* /*file*/, unsigned /*line*/, const char* /*function*/,
                              ucs_log_level_t level,
                              const ucs_log_component_config_t* /*component*/, const char* format,
                              va_list arguments) {
  const LogLevel own = level_of(level);
  const bool error = level <= UCS_LOG_LEVEL_ERROR;
  if (own < log_level() && !error) return UCS_LOG_FUNC_RC_STOP;
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  if (error) record_logged_error(text);
  if (own < log_level()) return UCS_LOG_FUNC_RC_STOP;
  log_message(own, std::string("ucx: ") + text);
  return UCS_LOG_FUNC_RC_STOP;
}

struct LoadedLibrary {
  Functions functions = {};
  std::string version = {};
  std::string problem = {};  ///< why the library cannot be used; empty if it can
};

LoadedLibrary load(const std::string& name) {
  LoadedLibrary loaded;
  void* handle = nullptr;
  {
    const LoadVariables read_while_loading;
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: it has threads
  }
  if (handle == nullptr) {
    loaded.problem = std::string(dlerror()) + "; install UCX (Debian: libucx0)";
    return loaded;
  }
  const std::string missing = find_functions(handle, loaded.functions);
  unsigned major = 0;
  unsigned minor = 0;
  unsigned patch = 0;
  if (missing.empty()) loaded.functions.get_version(&major, &minor, &patch);
  loaded.version = version_text(major, minor, patch);
  if (!missing.empty() || std::pair(major, minor) < std::pair(kOldestMajor, kOldestMinor)) {
    loaded.problem =
        text(name, ": expected UCX ", version_text(kOldestMajor, kOldestMinor, 0),
             " or newer, got ", missing.empty() ? loaded.version : "a version without " + missing);
    return loaded;
  }
  loaded.functions.push_log_handler(pass_on_log);
  close_descriptors_on_exec();
  return loaded;
}

/// Loads the system's library once, and any other library at each call.
const LoadedLibrary& loaded_from(const std::string& name, LoadedLibrary& other) {
  static const LoadedLibrary system = load(kSystemLibrary);
  if (name == kSystemLibrary) return system;
  other = load(name);
  return other;
}

Failure failure_of(ucs_status_t status) noexcept {
  if (status == UCS_OK) return Failure::kInBackground;
  return status == UCS_ERR_NO_MEMORY ? Failure::kOfMemory : Failure::kOfCall;
}

void check(const Functions& f, ucs_status_t status, const char* call) {
  if (status == UCS_OK) return;
  const std::string shortage = take_recorded_resource_exhaustion(failure_of(status));
  throw Error(text("ucx: ", call, " failed: ", f.status_string(status),
                   shortage.empty() ? "" : "; " + shortage));
}

/// UCX's context, which the workers of a rank share.
class Context {
 public:
  Context(const Functions&, const std::string& interface);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    f_.destroy_datatype(parts_);
    f_.cleanup(context_);
  }

  const Functions& functions() const noexcept { return f_; }
  ucp_context_h handle() const noexcept { return context_; }
  /// The datatype of a receive whose memory is Parts.
  ucp_datatype_t parts() const noexcept { return parts_; }

 private:
  const Functions f_;
  ucp_context_h context_ = nullptr;
  ucp_datatype_t parts_ = 0;
};

/// UCX passes each part of a message to the datatype instead of copying it. An error fails the
/// receive.
ucs_status_t read_part(void* state, std::size_t offset, const void* part, std::size_t bytes) {
  auto& parts = *static_cast<Parts*>(state);
  if (offset != parts.arrived || bytes > parts.bytes - offset) return UCS_ERR_INVALID_PARAM;
  parts.arrived += bytes;
  parts.reader->read({static_cast<const std::byte*>(part), bytes});
  return UCS_OK;
}

/// The functions for sending are not used. finish() must not use the state, which UCX may still
/// finish when the worker is destroyed.
constexpr ucp_generic_dt_ops_t kReadParts = {
    .start_pack = [](void*, const void*, std::size_t) -> void* { return nullptr; },
    .start_unpack = [](void*, void* parts, std::size_t) { return parts; },
    .packed_size = [](void* parts) { return static_cast<Parts*>(parts)->bytes; },
    .pack = [](void*, std::size_t, void*, std::size_t) { return std::size_t{0}; },
    .unpack = read_part,
    .finish = [](void*) {}};

Context::Context(const Functions& functions, const std::string& interface) : f_(functions) {
  ucp_config_t* config = nullptr;
  check(f_, f_.config_read(nullptr, nullptr, &config), "ucp_config_read");
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG;
  for (const auto& [name, value] : settings_to_change(interface)) {
    const ucs_status_t changed = f_.config_modify(config, name.c_str(), value.c_str());
    if (changed != UCS_OK) {
      HVD_LOG(kDebug) << "ucx: " << name << "=" << value
                      << " has no effect: " << f_.status_string(changed);
    }
  }
  const ucs_status_t made = f_.init(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  f_.config_release(config);
  check(f_, made, "ucp_init");
  check(f_, f_.create_datatype(&kReadParts, nullptr, &parts_), "ucp_dt_create_generic");
  close_descriptors_on_exec();  // of the transports that it has loaded
}

class UcxWorker final : public Worker {
 public:
  explicit UcxWorker(std::shared_ptr<const Context>);
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;
  ~UcxWorker() override { f_.worker_destroy(worker_); }

  std::vector<std::byte> address() override;
  Status connect(std::span<const std::byte> address, Status* failure, Endpoint& made) override;
  StartResult close(Endpoint, CloseMode) override;

  StartResult send(Endpoint endpoint, std::span<const std::byte> bytes, message::Tag tag) override {
    const ucp_request_param_t param = {};
    return started(f_.tag_send(endpoint_of(endpoint), bytes.data(), bytes.size(), tag, &param));
  }
  StartResult receive(std::span<std::byte> room, message::Tag tag) override {
    return started(
        f_.tag_recv(worker_, room.data(), room.size(), tag, ~message::Tag{0}, &always_a_request()));
  }
  StartResult receive(Parts& parts, message::Tag tag) override {
    ucp_request_param_t param = always_a_request();
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    param.datatype = context_->parts();
    return started(f_.tag_recv(worker_, &parts, 1, tag, ~message::Tag{0}, &param));
  }
  StartResult receive(std::span<std::byte> room, void* message) override {
    return started(f_.tag_msg_recv(worker_, room.data(), room.size(),
                                   static_cast<ucp_tag_message_h>(message), &always_a_request()));
  }
  std::optional<Matched> probe(message::Tag tag, message::Tag mask) override {
    ucp_tag_recv_info_t info = {};
    const ucp_tag_message_h found = f_.tag_probe(worker_, tag, mask, 1, &info);
    if (found == nullptr) return std::nullopt;
    return Matched{found, info.sender_tag, info.length};
  }

  Status status_of_send(void* request) override { return f_.check_status(request); }
  Status status_of_receive(void* request, std::size_t& bytes) override {
    ucp_tag_recv_info_t info = {};
    const Status status = f_.recv_test(request, &info);
    if (status == kOk) bytes = info.length;
    return status;
  }
  void cancel_receive(void* request) noexcept override { f_.cancel(worker_, request); }
  void free(void* request) noexcept override { f_.free(request); }

  bool progress() override { return f_.progress(worker_) != 0; }
  std::string describe(Status status) const override {
    return f_.status_string(static_cast<ucs_status_t>(status));
  }
  std::string take_resource_exhaustion(Status error) override {
    return take_recorded_resource_exhaustion(failure_of(static_cast<ucs_status_t>(error)));
  }

 private:
  static ucp_ep_h endpoint_of(Endpoint endpoint) { return static_cast<ucp_ep_h>(endpoint.handle); }
  static StartResult started(ucs_status_ptr_t answer) {
    if (UCS_PTR_IS_ERR(answer)) return {nullptr, UCS_PTR_STATUS(answer)};
    return {answer, answer == nullptr ? kOk : kInProgress};
  }
  /// Makes receives return a request even if the message has already arrived, because its size can
  /// only be read from the request.
  static const ucp_request_param_t& always_a_request() {
    static const ucp_request_param_t param = [] {
      ucp_request_param_t made = {};
      made.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
      return made;
    }();
    return param;
  }

  const std::shared_ptr<const Context> context_;
  const Functions& f_;
  ucp_worker_h worker_ = nullptr;
};

UcxWorker::UcxWorker(std::shared_ptr<const Context> context)
    : context_(std::move(context)), f_(context_->functions()) {
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // threads take turns to make progress
  check(f_, f_.worker_create(context_->handle(), &params, &worker_), "ucp_worker_create");
}

std::vector<std::byte> UcxWorker::address() {
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  check(f_, f_.get_address(worker_, &address, &bytes), "ucp_worker_get_address");
  const auto* const first = reinterpret_cast<const std::byte*>(address);
  std::vector<std::byte> copy(first, first + bytes);
  f_.release_address(worker_, address);
  return copy;
}

Status UcxWorker::connect(std::span<const std::byte> address, Status* failure, Endpoint& made) {
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* target, ucp_ep_h, ucs_status_t status) {
    *static_cast<Status*>(target) = status;
  };
  params.err_handler.arg = failure;
  ucp_ep_h endpoint = nullptr;
  const ucs_status_t status = f_.ep_create(worker_, &params, &endpoint);
  if (status == UCS_OK) made = {endpoint};
  return status;
}

StartResult UcxWorker::close(Endpoint endpoint, CloseMode mode) {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = mode == CloseMode::kForce ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  return started(f_.ep_close(endpoint_of(endpoint), &param));
}

Workers make_workers(const std::string& interface, const std::string& library) {
  const BlockedSignals for_threads_of_ucx;
  LoadedLibrary other;
  const LoadedLibrary& loaded = loaded_from(library, other);
  if (!loaded.problem.empty()) throw Error("ucx: " + loaded.problem);
  require_descriptors(kDescriptors);
  const auto context = std::make_shared<const Context>(loaded.functions, interface);
  Workers workers;
  workers.only_workers_touch_memory = only_tcp();
  workers.interface = interface_in_use(interface);
  for (auto& worker : workers.of) worker = std::make_unique<UcxWorker>(context);
  return workers;
}

/// Workers of the system's library that were made in advance, and their interface.
struct Prepared {
  Mutex mutex;
  std::optional<std::string> interface HVD_GUARDED_BY(mutex);  ///< of the last open_workers()
  std::optional<Workers> workers HVD_GUARDED_BY(mutex);
};

Prepared& prepared() {
  static Prepared* const instance = new Prepared;  // never destroyed
  return *instance;
}

}  // namespace

Workers open_workers(const std::string& interface, const std::string& library) {
  if (library != kSystemLibrary) return make_workers(interface, library);
  Prepared& shared = prepared();
  static_cast<void>(take_recorded_resource_exhaustion(Failure::kOfCall));  // that of an earlier job
  std::optional<Workers> ready;
  {
    const MutexLock lock(shared.mutex);
    ready.swap(shared.workers);
    const bool fits = shared.interface == interface;
    shared.interface = interface;
    if (ready && fits) return std::move(*ready);
  }
  return make_workers(interface, library);
}

void prepare_workers() {
  Prepared& shared = prepared();
  std::string interface;
  {
    const MutexLock lock(shared.mutex);
    if (!shared.interface || shared.workers) return;
    interface = *shared.interface;
  }
  Workers made = make_workers(interface, kSystemLibrary);
  const MutexLock lock(shared.mutex);
  if (shared.interface == interface && !shared.workers) shared.workers = std::move(made);
}

std::string describe_library(const std::string& library) {
  LoadedLibrary other;
  const LoadedLibrary& loaded = loaded_from(library, other);
  return loaded.problem.empty() ? loaded.version + " (" + library + ")"
                                : "not usable: " + loaded.problem;
}

}  // namespace hvd::ucx
