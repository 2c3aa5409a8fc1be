#include "backend/nccl/nccl_channel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/process_exit.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

constexpr const char* kWhileMakingWindows =
    "; expected NCCL to make windows of the fusion buffers, as HVD_NCCL_REGISTER=window asks for; "
    "set HVD_NCCL_REGISTER=auto to do without";

/// With two, one batch is packed while another is reduced.
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
      notes_(std::make_shared<Notes>()) {}

NcclChannel::~NcclChannel() {
  if (making_) device_->run_aside([making = std::move(making_)]() mutable { making.reset(); });
  for (auto& memory : fusion_memory_) keep_until_exit(std::move(memory));  // it is still in use
  if (comm_.handle == nullptr || state_ == State::kAborted) return;
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    if (state_ != State::kReady) {
      if (state_ == State::kOpening) keep_until_exit(notes_);
      teardown_->abort(comm_);
      return;
    }
    library_->begin_finalize(comm_);
    const TimePoint limit = clock_.now() + options_.finalize_timeout;
    Health health = library_->health(comm_);
    while (health.state == Health::State::kBusy && clock_.now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      health = library_->health(comm_);
    }
    const bool settled = health.state == Health::State::kSettled;
    settled ? teardown_->destroy(comm_) : teardown_->abort(comm_);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << who() << " was not left in order: " << error.what();
    teardown_->abort(comm_);
  }
}

std::string NcclChannel::who() const {
  return "the NCCL communicator of process set " + std::to_string(spec_.process_set) + " (rank " +
         std::to_string(spec_.set_rank) + " of " + std::to_string(spec_.ranks.size()) +
         ", device " + std::to_string(device_->device()) + ")";
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

// The id travels over the host's channel, which follows the plan like any other; so no rank blocks,
// and none has to know when the others get here.
void NcclChannel::meet() {
  if (!meeting_) {
    if (spec_.set_rank == 0) notes_->id = library_->make_id();
    Collective broadcast;
    broadcast.kind = OpKind::kBroadcast;
    broadcast.dtype = DataType::kUInt8;
    broadcast.count = static_cast<std::int64_t>(notes_->id.size());
    meeting_ = host_->launch(broadcast, notes_->id, notes_->id);
  }
  if (!meeting_->progress()) return;
  meeting_.reset();
  comm_ = library_->begin_init(notes_->id, size(), rank(), Blocking::kNo);
  teardown_->add(comm_);
  state_ = State::kJoining;
}

/// Shared with the thread that makes them. What nobody takes is freed there.
struct NcclChannel::Making {
  std::atomic<bool> done{false};
  std::vector<std::shared_ptr<std::byte>> memory = {};
  std::string error = {};
};

void NcclChannel::make_buffers() {
  state_ = State::kAllocating;
  if (size() == 1 || options_.registered_bytes == 0 || !library_->has_registration()) return;
  making_ = std::make_shared<Making>();
  device_->run_aside([making = making_, source = device_->memory(), library = library_,
                      bytes = options_.registered_bytes]() noexcept {
    try {
      for (int i = 0; i < kFusionBuffers; ++i) {
        std::byte* made = nullptr;
        source->with_room(bytes, [&] { made = library->allocate(bytes); });
        making->memory.push_back(
            source->owned(made, [library](std::byte* mine) { library->release(mine); }));
      }
    } catch (const std::exception& error) {
      making->error = error.what();
    }
    making->done.store(true, std::memory_order_release);
  });
}

// Note [Registered on all ranks or on none]: a collective of which some ranks pass registered
// memory and others do not is undefined. So the buffers are made once, before the first launch, and
// one vote over the host's channel says whether all ranks have them, of one size: then the least of
// all sizes is the greatest, and not 0. Who has none votes too. A rank alone has nothing to gain
// from it.
void NcclChannel::propose() {
  state_ = State::kAgreeing;
  if (size() == 1) return;
  const std::int64_t bytes =
      register_buffers() ? static_cast<std::int64_t>(options_.registered_bytes) : 0;
  vote({bytes, -bytes, options_.windows && library_->has_windows() ? 1 : 0});
}

void NcclChannel::vote(const Votes& own) {
  notes_->votes = own;
  Collective vote;
  vote.kind = OpKind::kAllreduce;
  vote.op = ReduceOp::kMin;
  vote.dtype = DataType::kInt64;
  vote.count = static_cast<std::int64_t>(own.size());
  const std::span<std::byte> votes = std::as_writable_bytes(std::span(notes_->votes));
  meeting_ = host_->launch(vote, votes, votes);
}

bool NcclChannel::voted() {
  if (meeting_ && !meeting_->progress()) return false;
  meeting_.reset();
  return true;
}

void NcclChannel::agree() {
  if (!voted()) return;
  state_ = State::kReady;
  if (fusion_buffers_.empty()) return;
  if (notes_->votes[0] <= 0 || notes_->votes[0] != -notes_->votes[1]) {
    HVD_LOG(kDebug) << who()
                    << " works without registered buffers: not every rank has registered as much";
    return give_back_fusion_buffers();
  }
  if (notes_->votes[2] == 1) {
    state_ = State::kOpening;
  } else if (options_.windows) {
    HVD_LOG(kDebug) << who() << " works without windows: not every rank wants and has them";
  }
}

// Note [Windows on all ranks or on none]: making one is collective and takes the ranks' help until
// its end, so it begins only when all have said that they will, and there is no way back from an
// error: the communicator has failed. NCCL says itself, and then to all ranks, where it has no use
// for windows; a vote makes sure of the latter. The buffers stay registered in any case.
void NcclChannel::open_windows() {
  static_assert(kFusionBuffers == std::tuple_size_v<decltype(Notes::windows)>);
  try {
    while (settled()) {
      if (windows_begun_ == fusion_buffers_.size()) {
        state_ = State::kConfirming;
        const bool all = std::find(notes_->windows.begin(), notes_->windows.end(), nullptr) ==
                         notes_->windows.end();
        return vote({all ? 1 : 0, 0, 0});
      }
      const std::span<std::byte> buffer = fusion_buffers_[windows_begun_];
      void** const window = &notes_->windows[windows_begun_++];
      library_->begin_register_window(comm_, buffer.data(), buffer.size(), window);
    }
  } catch (const PeerLostError& error) {
    throw PeerLostError(error.what() + std::string(kWhileMakingWindows), error.rank());
  } catch (const Error& error) {
    throw Error(error.what() + std::string(kWhileMakingWindows));
  }
}

void NcclChannel::confirm_windows() {
  if (!voted()) return;
  state_ = State::kReady;
  if (notes_->votes[0] == 1) return;
  HVD_LOG(kDebug) << who()
                  << " works without windows: NCCL has no use for them between these ranks";
  close_windows();
}

void NcclChannel::close_windows() noexcept {
  for (void*& window : notes_->windows) {
    if (window != nullptr) library_->deregister_window(comm_, std::exchange(window, nullptr));
  }
}

bool NcclChannel::register_buffers() {
  const std::shared_ptr<Making> made = std::exchange(making_, nullptr);
  if (!made) return false;
  fusion_memory_ = std::move(made->memory);
  for (const auto& memory : fusion_memory_)
    fusion_buffers_.emplace_back(memory.get(), options_.registered_bytes);
  try {
    if (!made->error.empty()) throw Error(made->error);
    for (const std::span<std::byte> buffer : fusion_buffers_)
      registrations_.push_back(library_->register_buffer(comm_, buffer.data(), buffer.size()));
    return true;
  } catch (const Error& error) {
    HVD_LOG(kDebug) << who() << " works without registered buffers: " << error.what();
  }
  give_back_fusion_buffers();
  return false;
}

void NcclChannel::deregister_buffers() noexcept {
  if (state_ != State::kAborted) close_windows();
  for (void* const registration : registrations_) library_->deregister_buffer(comm_, registration);
  registrations_.clear();
}

bool NcclChannel::ready() {
  if (state_ == State::kReady) return true;
  if (state_ == State::kAborted) throw Error(who() + " has been aborted");
  const device::DeviceGuard guard(device_->api(), device_->device());
  if (state_ == State::kMeeting) meet();
  if (state_ == State::kJoining && settled()) make_buffers();
  if (state_ == State::kAllocating && (!making_ || making_->done.load(std::memory_order_acquire)))
    propose();
  if (state_ == State::kAgreeing) agree();
  if (state_ == State::kOpening) open_windows();
  if (state_ == State::kConfirming) confirm_windows();
  if (state_ == State::kReady) return true;
  if (clock_.now() < deadline_) return false;
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(options_.init_timeout);
  if (state_ == State::kOpening || state_ == State::kConfirming) {
    throw PeerLostError(
        who() + " was not ready after " + std::to_string(waited.count()) +
            " s: expected all its ranks to make windows of their fusion buffers "
            "(HVD_NCCL_REGISTER=window), but at least one did " +
            "not; set it to auto to do without, and the NCCL_ variables alike on every rank",
        -1);
  }
  throw PeerLostError(who() + " was not ready after " + std::to_string(waited.count()) +
                          " s: expected all its ranks to join, but at least one did not "
                          "(HVD_START_TIMEOUT; NCCL_DEBUG=INFO shows more)",
                      -1);
}

std::unique_ptr<Work> NcclChannel::launch(const Collective& collective,
                                          std::span<const std::byte> in, std::span<std::byte> out) {
  if (state_ != State::kReady)
    throw Error(who() + " is not ready for " + std::string(to_string(collective.kind)));
  const device::DeviceGuard guard(device_->api(), device_->device());
  return make_work(*this, collective, in, out);
}

void NcclChannel::check_health() {
  if (state_ != State::kReady) return;
  const Health health = library_->health(comm_);
  if (health.state == Health::State::kFailed) fail(health);
}

void NcclChannel::abort() noexcept {
  const State before = std::exchange(state_, State::kAborted);
  if (before == State::kAborted) return;
  host_->abort();
  if (meeting_ || before == State::kOpening) keep_until_exit(notes_);
  meeting_.reset();
  teardown_->abort_all();
  registrations_.clear();  // NCCL undoes them once its kernels have ended; sooner would take the
                           // memory from under them
}

void NcclChannel::wait_for_abort() noexcept {
  if (state_ == State::kAborted) teardown_->wait();
}

void NcclChannel::give_back_fusion_buffers() noexcept {
  if (fusion_buffers_.empty()) return;
  wait_for_abort();
  try {
    const device::DeviceGuard guard(device_->api(), device_->device());
    deregister_buffers();
    fusion_buffers_.clear();
    device_->run_aside([memory = std::move(fusion_memory_)]() mutable { memory.clear(); });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << who() << " has not freed its fusion buffers: "
                    << error.what();  // the device has failed, which others report
  }
}

}  // namespace hvd::nccl
