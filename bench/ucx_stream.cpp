#include "bench/streams.h"

#include <sched.h>
#include <ucp/api/ucp.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace hvd::bench {
namespace {

constexpr ucp_tag_t kTag = 1;

void check(ucs_status_t status, const char* call) {
  if (status == UCS_OK) return;
  throw std::runtime_error(std::string("ucx stream: ") + call + ": " + ucs_status_string(status));
}

class UcxStream final : public Stream {
 public:
  UcxStream(Swap swap, void* context) {
    open_worker();
    ucp_address_t* address = nullptr;
    std::size_t bytes = 0;
    check(ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
    const auto* const first = reinterpret_cast<const std::byte*>(address);
    const Bytes own(first, first + bytes);
    ucp_worker_release_address(worker_, address);
    connect(swap(own, context));
  }
  ~UcxStream() override {
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;  // the exchanges are over
    void* const request = ucp_ep_close_nbx(endpoint_, &param);
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) {
      while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(worker_);
      ucp_request_free(request);
    }
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }

  void exchange(std::span<const std::byte> out, std::span<std::byte> in) override {
    const ucp_request_param_t param = {};
    void* const receive =
        ucp_tag_recv_nbx(worker_, in.data(), in.size(), kTag, ~ucp_tag_t{0}, &param);
    void* const send = ucp_tag_send_nbx(endpoint_, out.data(), out.size(), kTag, &param);
    wait(send, "ucp_tag_send_nbx");
    wait(receive, "ucp_tag_recv_nbx");
  }

 private:
  void open_worker() {
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    // Restores the defaults of the settings that hvd changes for its own workers.
    for (const auto& [name, value] :
         {std::pair("RNDV_SCHEME", "auto"), std::pair("RNDV_THRESH", "auto"),
          std::pair("TCP_RX_SEG_SIZE", "64k")})
      check(ucp_config_modify(config, name, value), "ucp_config_modify");
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG;
    const ucs_status_t made = ucp_init(&params, config, &context_);
    ucp_config_release(config);
    check(made, "ucp_init");
    ucp_worker_params_t worker = {};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create");
  }
  void connect(const Bytes& peer) {
    ucp_ep_params_t params = {};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(peer.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    check(ucp_ep_create(worker_, &params, &endpoint_), "ucp_ep_create");
  }
  void wait(void* request, const char* call) {
    if (request == nullptr) return;
    check(UCS_PTR_STATUS(request) == UCS_OK || !UCS_PTR_IS_ERR(request) ? UCS_OK
                                                                        : UCS_PTR_STATUS(request),
          call);
    ucs_status_t status = UCS_INPROGRESS;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS)
      if (ucp_worker_progress(worker_) == 0) ::sched_yield();
    ucp_request_free(request);
    check(status, call);
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
};

}  // namespace
}  // namespace hvd::bench

extern "C" hvd::bench::Stream* hvd_bench_open_ucx_stream(hvd::bench::Swap swap, void* context) {
  return new hvd::bench::UcxStream(swap, context);
}
