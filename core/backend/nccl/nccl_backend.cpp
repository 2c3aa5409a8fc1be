#include "backend/nccl/nccl_backend.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "backend/nccl/nccl_channel.h"
#include "base/log.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd {
namespace nccl {
namespace {

/// Two buffers, so that one batch is packed while another is reduced.
constexpr int kFusionBuffers = 2;

}  // namespace

NcclChannel::NcclChannel(std::shared_ptr<Library> library, std::shared_ptr<device::Context> device,
                         std::shared_ptr<const device::OwnedStream> stream,
                         std::shared_ptr<CommTeardown> teardown, const ChannelSpec& spec,
                         std::unique_ptr<Channel> host, const NcclOptions& options,
                         const Clock& clock)
    : library_(std::move(library)),
      device_(std::move(device)),
      stream_(std::move(stream)),
      teardown_(std::move(teardown)),
      spec_(spec),
      options_(options),
      clock_(clock),
      deadline_(clock_.now() + options_.init_timeout),
      host_(std::move(host)),
      buffers_(*device_),
      exchanged_(std::make_shared<Exchanged>()) {}

NcclChannel::~NcclChannel() {
  if (allocation_)
    device_->run_on_helper([allocation = std::move(allocation_)]() mutable { allocation.reset(); });
  for (auto& memory : fusion_memory_) keep_until_exit(std::move(memory));  // still in use
  if (comm_.handle == nullptr || phase_ == ChannelPhase::kAborted) return;
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    if (phase_ != ChannelPhase::kReady) {
      teardown_->abort(comm_);
      return;
    }
    // A runtime that ends without shutdown() may leave a launch under way. Until it is complete,
    // NCCL allows no other call on the communicator.
    const TimePoint limit = clock_.now() + options_.finalize_timeout;
    bool finalized = wait_until_settled(limit);
    if (finalized) {
      library_->begin_finalize(comm_);
      finalized = wait_until_settled(limit);
    }
    finalized ? teardown_->destroy(comm_) : teardown_->abort(comm_);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << description() << " could not be finalized and is aborted: " << error.what();
    teardown_->abort(comm_);
  }
}

/// Waits for the end of the last call on the communicator. @return false: it failed or took too
/// long
bool NcclChannel::wait_until_settled(TimePoint limit) {
  Health health = library_->health(comm_);
  while (health.state == CommState::kBusy && clock_.now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    health = library_->health(comm_);
  }
  return health.state == CommState::kSettled;
}

std::string NcclChannel::description() const {
  return text("the NCCL communicator of process set ", spec_.process_set, " (rank ", spec_.set_rank,
              " of ", spec_.ranks.size(), ", device ", device_->device(), ")");
}

void NcclChannel::fail(const Health& health) const {
  const std::string failure = text(description(), " has failed: ", health.text);
  if (health.remote) throw PeerLostError(failure, -1);
  throw Error(failure);
}

bool NcclChannel::settled() {
  const Health health = library_->health(comm_);
  if (health.state == CommState::kFailed) fail(health);
  return health.state == CommState::kSettled;
}

// The id is broadcast over the host's channel. That channel follows the plan like every other
// channel, so no rank blocks until the other ranks reach this point.
void NcclChannel::exchange_id() {
  if (!exchange_) {
    if (spec_.set_rank == 0) exchanged_->id = library_->make_id();
    Collective broadcast;
    broadcast.kind = OpKind::kBroadcast;
    broadcast.dtype = DataType::kUInt8;
    broadcast.count = static_cast<std::int64_t>(exchanged_->id.size());
    exchange_ = host_->launch(broadcast, exchanged_->id, exchanged_->id);
  }
  if (!exchange_->progress()) return;
  exchange_.reset();
  comm_ = library_->begin_init(exchanged_->id, size(), rank(), Blocking::kNo);
  teardown_->add(comm_);
  phase_ = ChannelPhase::kJoining;
}

void NcclChannel::allocate_fusion_buffers() {
  phase_ = ChannelPhase::kAllocating;
  if (size() == 1 || options_.registered_bytes == 0 || !library_->has_registration()) return;
  using Memory = std::shared_ptr<std::byte>;
  allocation_ = device_->allocate_on_helper<Memory>(
      [source = device_->memory(), library = library_,
       bytes = options_.registered_bytes](std::vector<Memory>& buffers) {
        for (int i = 0; i < kFusionBuffers; ++i) {
          std::byte* memory = nullptr;
          source->with_room(bytes, [&] { memory = library->allocate(bytes); });
          buffers.push_back(
              source->owned(memory, [library](std::byte* owned) { library->release(owned); }));
        }
      });
}

// Note [Registration on all ranks]: a collective is undefined if some ranks pass registered memory
// and others do not. Therefore the buffers are allocated once, before the first launch, and a vote
// over the host's channel decides whether all ranks have registered buffers of one size. The vote
// is a minimum over (bytes, -bytes): all sizes are equal if the two results have the same
// magnitude. A rank without buffers votes 0. A set of one rank does not benefit from registration
// and skips it.
void NcclChannel::begin_vote() {
  phase_ = ChannelPhase::kVoting;
  if (size() == 1) return;
  const std::int64_t bytes =
      register_buffers() ? static_cast<std::int64_t>(options_.registered_bytes) : 0;
  exchanged_->votes = {bytes, -bytes};
  Collective minimum;
  minimum.kind = OpKind::kAllreduce;
  minimum.op = ReduceOp::kMin;
  minimum.dtype = DataType::kInt64;
  minimum.count = static_cast<std::int64_t>(exchanged_->votes.size());
  const std::span<std::byte> votes = std::as_writable_bytes(std::span(exchanged_->votes));
  exchange_ = host_->launch(minimum, votes, votes);
}

void NcclChannel::finish_vote() {
  if (exchange_ && !exchange_->progress()) return;
  exchange_.reset();
  phase_ = ChannelPhase::kReady;
  if (fusion_buffers_.empty()) return;
  const auto [smallest, negated_largest] = exchanged_->votes;
  if (smallest > 0 && smallest == -negated_largest) return;
  HVD_LOG(kDebug) << description()
                  << " works without registered buffers, because some ranks have none or buffers "
                     "of another size";
  release_fusion_buffers();
}

bool NcclChannel::register_buffers() {
  const auto allocated = std::exchange(allocation_, nullptr);
  if (!allocated) return false;
  fusion_memory_ = std::move(allocated->resources);
  for (const auto& memory : fusion_memory_)
    fusion_buffers_.emplace_back(memory.get(), options_.registered_bytes);
  try {
    if (allocated->error) std::rethrow_exception(allocated->error);
    for (const std::span<std::byte> buffer : fusion_buffers_)
      registrations_.push_back(library_->register_buffer(comm_, buffer.data(), buffer.size()));
    return true;
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << description() << " works without registered buffers: " << error.what();
  }
  release_fusion_buffers();
  return false;
}

void NcclChannel::deregister_buffers() noexcept {
  for (void* const registration : registrations_) library_->deregister_buffer(comm_, registration);
  registrations_.clear();
}

bool NcclChannel::ready() {
  if (phase_ == ChannelPhase::kReady) return true;
  if (phase_ == ChannelPhase::kAborted) throw Error(description() + " has been aborted");
  const device::DeviceGuard guard(device_->api(), device_->device());
  if (phase_ == ChannelPhase::kExchangingId) exchange_id();
  if (phase_ == ChannelPhase::kJoining && settled()) allocate_fusion_buffers();
  if (phase_ == ChannelPhase::kAllocating &&
      (!allocation_ || allocation_->done.load(std::memory_order_acquire)))
    begin_vote();
  if (phase_ == ChannelPhase::kVoting) finish_vote();
  if (phase_ == ChannelPhase::kReady) return true;
  if (clock_.now() < deadline_) return false;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(options_.init_timeout);
  throw PeerLostError(text(description(), " was not ready after ", waited.count(),
                           " s: expected all its ranks to join, but at least one did not "
                           "(HVD_START_TIMEOUT; NCCL_DEBUG=INFO shows more)"),
                      -1);
}

std::unique_ptr<Work> NcclChannel::launch(const Collective& collective,
                                          std::span<const std::byte> in, std::span<std::byte> out) {
  if (phase_ != ChannelPhase::kReady)
    throw Error(text(description(), " is not ready for ", to_string(collective.kind)));
  const device::DeviceGuard guard(device_->api(), device_->device());
  return make_work(*this, collective, in, out);
}

void NcclChannel::check_health() {
  if (phase_ == ChannelPhase::kReady) settled();
}

void NcclChannel::abort() noexcept {
  const ChannelPhase before = std::exchange(phase_, ChannelPhase::kAborted);
  if (before == ChannelPhase::kAborted) return;
  host_->abort();
  if (exchange_) keep_until_exit(exchanged_);
  exchange_.reset();
  teardown_->abort_all();
  registrations_.clear();  // the abort ends them, after the kernels that use the memory
}

void NcclChannel::wait_for_abort() noexcept {
  if (phase_ == ChannelPhase::kAborted) teardown_->wait();
}

void NcclChannel::release_fusion_buffers() noexcept {
  if (fusion_buffers_.empty()) return;
  wait_for_abort();
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    deregister_buffers();
    fusion_buffers_.clear();
    device_->run_on_helper([memory = std::move(fusion_memory_)]() mutable { memory.clear(); });
  } catch (const std::exception& error) {  // the device has failed; its operations report it
    HVD_LOG(kDebug) << description() << " has not freed its fusion buffers: " << error.what();
  }
}

}  // namespace nccl

NcclBackend::NcclBackend(std::shared_ptr<nccl::Library> library,
                         std::shared_ptr<device::Context> device,
                         nccl::OpenHostChannel open_host_channel, const nccl::NcclOptions& options,
                         const Clock& clock)
    : library_(std::move(library)),
      device_(std::move(device)),
      open_host_channel_(std::move(open_host_channel)),
      options_(options),
      clock_(clock),
      teardown_(std::make_shared<nccl::CommTeardown>(library_, device_, options.teardown_timeout)) {
}

const Clock& NcclBackend::steady_clock() {
  static const SteadyClock clock;
  return clock;
}

int NcclBackend::score(const Topology&, const ChannelSpec& spec,
                       const Collective& collective) const noexcept {
  constexpr int kScore = 30;  // above every backend for host memory, which would have to copy
  if (spec.device.type != DeviceType::kCuda || collective.op == ReduceOp::kAdasum) return 0;
  switch (collective.kind) {
    case OpKind::kBroadcast:
    case OpKind::kAllgather:
    case OpKind::kAlltoall:
      return kScore;
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      if (collective.dtype == DataType::kInt16) return 0;
      // NCCL has no bitwise operations. For bools, "and" is a minimum and "or" is a maximum, so
      // only these run here.
      if (is_bitwise(collective.op) &&
          (collective.dtype != DataType::kBool || collective.op == ReduceOp::kBitXor))
        return 0;
      // The host computes averages of integers exactly; with NCCL the sum could overflow first.
      return is_floating(collective.dtype) || collective.scale.identity() ? kScore : 0;
    default:
      return 0;
  }
}

// Note [One stream for all communicators]: a kernel of NCCL occupies its part of the GPU until all
// ranks of its communicator run theirs. With one stream per communicator, one rank's GPU could
// start the kernel of communicator A first, and another rank's GPU that of communicator B. The
// ranks would then wait for each other forever, although both hosts launched the kernels in the
// same order. In one stream the device keeps the host's order, which is the plan's and therefore
// the same on all ranks. From version 2.26 on NCCL has a setting with the same effect
// (NCCL_LAUNCH_ORDER_IMPLICIT).
std::unique_ptr<Channel> NcclBackend::open(const ChannelSpec& spec, Peers& peers) {
  ChannelSpec host = spec;
  host.device = {};
  host.instance = 1;
  if (!stream_) stream_ = std::make_shared<device::OwnedStream>(*device_);
  return std::make_unique<nccl::NcclChannel>(library_, device_, stream_, teardown_, spec,
                                             open_host_channel_(host, peers), options_, clock_);
}

}  // namespace hvd
