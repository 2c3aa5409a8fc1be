#include "backend/nccl/nccl_channel.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

/// A broadcast that was cut off may still write to it.
void keep_for_ever(std::shared_ptr<UniqueId> id) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<UniqueId>>;  // never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(id));
}

}  // namespace

NcclChannel::NcclChannel(std::shared_ptr<Library> library, std::shared_ptr<device::Context> device, const ChannelSpec& spec,
                         std::unique_ptr<Channel> host, const NcclOptions& options, const Clock& clock)
    : library_(std::move(library)),
      device_(std::move(device)),
      spec_(spec),
      options_(options),
      clock_(clock),
      deadline_(clock_.now() + options_.init_timeout),
      host_(std::move(host)),
      stream_(*device_),
      buffers_(device_->api(), device_->device(), device_->plain_memory()),
      id_(std::make_shared<UniqueId>()) {}

NcclChannel::~NcclChannel() {
  if (comm_.handle == nullptr || state_ == State::kAborted) return;
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    for (const auto& [memory, registration] : registrations_) library_->deregister_buffer(comm_, registration);
    if (state_ != State::kReady) {
      library_->abort(comm_);
      return;
    }
    library_->begin_finalize(comm_);
    const TimePoint limit = clock_.now() + options_.finalize_timeout;
    Health health = library_->health(comm_);
    while (health.state == Health::State::kBusy && clock_.now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      health = library_->health(comm_);
    }
    health.state == Health::State::kSettled ? library_->destroy(comm_) : library_->abort(comm_);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << who() << " was not left in order: " << error.what();
  }
}

std::string NcclChannel::who() const {
  return "the NCCL communicator of process set " + std::to_string(spec_.process_set) + " (rank " + std::to_string(spec_.set_rank) + " of " +
         std::to_string(spec_.ranks.size()) + ", device " + std::to_string(device_->device()) + ")";
}

void NcclChannel::fail(const Health& health) const {
  const std::string text = who() + " has failed: " + health.text;
  if (health.remote) throw PeerLostError(text, -1);
  throw Error(text);
}

bool NcclChannel::settled() {
  const Health health = library_->health(comm_);
  if (health.state == Health::State::kFailed) fail(health);
  return health.state == Health::State::kSettled;
}

// The id travels over the host's channel, which follows the plan like any other; so no rank blocks, and none has to know when the
// others get here.
void NcclChannel::meet() {
  if (!meeting_) {
    if (spec_.set_rank == 0) *id_ = library_->make_id();
    Collective broadcast;
    broadcast.kind = OpKind::kBroadcast;
    broadcast.dtype = DataType::kUInt8;
    broadcast.count = static_cast<std::int64_t>(id_->size());
    meeting_ = host_->launch(broadcast, *id_, *id_);
  }
  if (!meeting_->progress()) return;
  meeting_.reset();
  comm_ = library_->begin_init(*id_, size(), rank());
  state_ = State::kJoining;
}

bool NcclChannel::ready() {
  if (state_ == State::kReady) return true;
  if (state_ == State::kAborted) throw Error(who() + " has been aborted");
  const device::DeviceGuard guard(device_->api(), device_->device());
  if (state_ == State::kMeeting) meet();
  if (state_ == State::kJoining && settled()) {
    state_ = State::kReady;
    return true;
  }
  if (clock_.now() < deadline_) return false;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(options_.init_timeout);
  throw PeerLostError(who() + " was not ready after " + std::to_string(waited.count()) +
                          " s: expected all its ranks to join, but at least one did not (HVD_START_TIMEOUT; NCCL_DEBUG=INFO shows more)",
                      -1);
}

std::unique_ptr<Work> NcclChannel::launch(const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out) {
  if (state_ != State::kReady) throw Error(who() + " is not ready for " + std::string(to_string(collective.kind)));
  const device::DeviceGuard guard(device_->api(), device_->device());
  return make_work(*this, collective, in, out);
}

void NcclChannel::check_health() {
  if (state_ != State::kReady) return;
  const Health health = library_->health(comm_);
  if (health.state == Health::State::kFailed) fail(health);
}

void NcclChannel::abort() noexcept {
  if (std::exchange(state_, State::kAborted) == State::kAborted) return;
  host_->abort();
  if (meeting_) keep_for_ever(id_);
  meeting_.reset();
  if (comm_.handle == nullptr) return;
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    library_->abort(comm_);
  } catch (const std::exception& error) {
    HVD_LOG(kError) << who() << " could not be aborted: " << error.what();
  }
}

std::byte* NcclChannel::allocate(std::size_t bytes) {
  if (!options_.registers_buffers || !library_->has_registration()) return nullptr;
  std::byte* const memory = library_->allocate(bytes);
  registrations_[memory] = library_->register_buffer(comm_, memory, bytes);
  return memory;
}

void NcclChannel::release(std::byte* memory) noexcept {
  const auto found = registrations_.find(memory);
  if (found == registrations_.end()) return;
  if (state_ == State::kReady) library_->deregister_buffer(comm_, found->second);
  registrations_.erase(found);
  library_->release(memory);
}

}  // namespace hvd::nccl
