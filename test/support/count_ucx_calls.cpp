#include "support/count_ucx_calls.h"

#include <dlfcn.h>

#include <atomic>
#include <string_view>
#include <type_traits>

#if HVD_HAVE_UCX
#include <ucp/api/ucp.h>
#include <ucp/api/ucp_compat.h>

#include "transport/carrier.h"
#endif

namespace {

std::atomic<std::uint64_t> calls{0};
std::atomic<std::uint64_t> polls{0};
std::atomic<std::uint64_t> control_messages{0};
std::atomic<std::uint64_t> data_messages{0};

#if HVD_HAVE_UCX

/// Replaces one of UCX's functions.
template <int kNumber, class Signature>
struct Counted;
template <int kNumber, class Result, class... Arguments>
struct Counted<kNumber, Result(Arguments...)> {
  static inline std::atomic<Result (*)(Arguments...)> real = nullptr;

  static Result call(Arguments... arguments) {
    calls.fetch_add(1);
    return real.load()(arguments...);
  }
  static void* instead_of(void* function) {
    real = reinterpret_cast<Result (*)(Arguments...)>(function);
    return reinterpret_cast<void*>(&call);
  }
};

decltype(&ucp_worker_progress) real_progress = nullptr;
unsigned progress(ucp_worker_h worker) {
  polls.fetch_add(1);
  return real_progress(worker);
}

decltype(&ucp_tag_send_nbx) real_send = nullptr;
ucs_status_ptr_t send(ucp_ep_h endpoint, const void* bytes, size_t count, ucp_tag_t tag,
                      const ucp_request_param_t* param) {
  using hvd::message::parts_of;
  const int kind = parts_of(tag).kind;
  if (kind == hvd::message::kControlKind) control_messages.fetch_add(1);
  const bool of_carrier = kind == hvd::message::kHelloKind || kind == hvd::message::kPrimerKind;
  if (kind != hvd::message::kControlKind && !of_carrier) data_messages.fetch_add(1);
  return real_send(endpoint, bytes, count, tag, param);
}

struct Replacement {
  std::string_view name;
  void* (*instead_of)(void*);
};
#define HVD_COUNTED(function) \
  {#function, Counted<__LINE__, std::remove_pointer_t<decltype(&function)>>::instead_of}
// clang-format off
constexpr Replacement kReplacements[] = {
    HVD_COUNTED(ucp_worker_progress),
    HVD_COUNTED(ucp_ep_create),
    HVD_COUNTED(ucp_ep_close_nbx),
    HVD_COUNTED(ucp_tag_send_nbx),
    HVD_COUNTED(ucp_tag_recv_nbx),
    HVD_COUNTED(ucp_tag_msg_recv_nbx),
    HVD_COUNTED(ucp_tag_probe_nb),
    HVD_COUNTED(ucp_tag_recv_request_test),
    HVD_COUNTED(ucp_request_check_status),
    HVD_COUNTED(ucp_request_cancel),
    HVD_COUNTED(ucp_request_free),
};
// clang-format on
#undef HVD_COUNTED

void* replaced(std::string_view name, void* function) {
  if (name == "ucp_worker_progress") {
    real_progress = reinterpret_cast<decltype(real_progress)>(function);
    function = reinterpret_cast<void*>(&progress);
  }
  if (name == "ucp_tag_send_nbx") {
    real_send = reinterpret_cast<decltype(real_send)>(function);
    function = reinterpret_cast<void*>(&send);
  }
  for (const Replacement& replacement : kReplacements)
    if (replacement.name == name) return replacement.instead_of(function);
  return function;
}

#endif

}  // namespace

hvd::testing::UcxCalls hvd::testing::ucx_calls() noexcept {
  return {calls.load(), polls.load(), control_messages.load(), data_messages.load()};
}

#if HVD_HAVE_UCX
// Replaces the system's dlsym() for the program and its libraries.
extern "C" void* dlsym(void* library, const char* name) noexcept {
  using Function = void* (*)(void*, const char*);
  static const auto real = [] {
    void* found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (found == nullptr) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return reinterpret_cast<Function>(found);
  }();
  void* const function = real(library, name);
  return function == nullptr ? nullptr : replaced(name, function);
}
#endif
