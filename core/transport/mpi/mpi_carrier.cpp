#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/mpi/call_watch.h"
#include "transport/mpi/communicator.h"
#include "transport/mpi/environment.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::mpi {
namespace {

using message::Completion;
using message::MemoryRelease;
using message::Plane;
using message::ProbedMessage;
using message::Tag;

int tag_of(Tag tag) noexcept { return static_cast<int>(tag & message::kChannelMask); }

std::uint64_t handle_of(MPI_Message matched) noexcept {
  static_assert(sizeof(MPI_Message) <= sizeof(std::uint64_t));
  std::uint64_t handle = 0;
  std::memcpy(&handle, &matched, sizeof matched);
  return handle;
}

MPI_Message message_of(std::uint64_t handle) noexcept {
  MPI_Message matched = MPI_MESSAGE_NULL;
  std::memcpy(&matched, &handle, sizeof matched);
  return matched;
}

class MpiRequests final : public message::Requests {
 public:
  MpiRequests(MPI_Comm communicator, Plane plane) : communicator_(communicator), plane_(plane) {}

  void reset(std::size_t slots) override;
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, const ProbedMessage& arrival) override;
  std::span<const Completion> test() override;
  // MPI cannot cancel messages reliably; see Note [Memory after a failure].
  MemoryRelease cancel() noexcept override { return MemoryRelease::kNever; }

 private:
  struct Slot {
    int peer = kNoPeer;
    bool receives = false;
  };
  /// For error texts.
  const char* call_name(bool receives) const noexcept {
    if (plane_ == Plane::kData) return receives ? "MPI_Irecv" : "MPI_Isend";
    return receives ? "MPI_Irecv of a control message" : "MPI_Isend of a control message";
  }
  bool idle(std::size_t slot) const noexcept { return requests_[slot] == MPI_REQUEST_NULL; }
  bool all_idle() const noexcept {
    return std::all_of(requests_.begin(), requests_.end(),
                       [](MPI_Request request) { return request == MPI_REQUEST_NULL; });
  }

  const MPI_Comm communicator_;
  const Plane plane_;
  std::vector<MPI_Request> requests_;
  std::vector<Slot> slots_;
  // Results of MPI_Testsome, and their translation.
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
  std::vector<Completion> completions_;
};

void MpiRequests::reset(std::size_t slots) {
  HVD_EXPECT(all_idle(), "no message is under way");
  requests_.assign(slots, MPI_REQUEST_NULL);
  slots_.assign(slots, Slot{});
  done_.resize(slots);
  statuses_.resize(slots);
  completions_.resize(slots);
}

void MpiRequests::send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) {
  HVD_EXPECT(idle(slot), "the slot has no message under way");
  const WatchedCall watched("MPI_Isend", peer);
  check(MPI_Isend(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, peer, tag_of(tag),
                  communicator_, &requests_[slot]),
        call_name(/*receives=*/false), peer);
  slots_[slot] = {peer, false};
}

void MpiRequests::receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) {
  HVD_EXPECT(idle(slot), "the slot has no message under way");
  const WatchedCall watched("MPI_Irecv", peer);
  check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, peer, tag_of(tag),
                  communicator_, &requests_[slot]),
        call_name(/*receives=*/true), peer);
  slots_[slot] = {peer, true};
}

void MpiRequests::receive(std::size_t slot, std::span<std::byte> bytes,
                          const ProbedMessage& arrival) {
  HVD_EXPECT(idle(slot), "the slot has no message under way");
  const WatchedCall watched("MPI_Imrecv", arrival.source);
  MPI_Message matched = message_of(arrival.handle);
  check(MPI_Imrecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, &matched,
                   &requests_[slot]),
        "MPI_Imrecv", arrival.source);
  slots_[slot] = {arrival.source, true};
}

std::span<const Completion> MpiRequests::test() {
  HVD_EXPECT(!all_idle(), "a message is under way");
  int count = 0;
  const WatchedCall watched("MPI_Testsome", slots_.size() == 1 ? slots_.front().peer : kNoPeer);
  // Twice, because Open MPI tests first and then receives; see MpiCarrier::probe().
  for (int attempt = 0; attempt < 2 && count == 0; ++attempt) {
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  done_.data(), statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (std::size_t index = 0; index < static_cast<std::size_t>(count); ++index) {
        const Slot& slot = slots_[static_cast<std::size_t>(done_[index])];
        check(statuses_[index].MPI_ERROR, call_name(slot.receives), slot.peer);
      }
    }
    check(code, "MPI_Testsome");
    if (count == MPI_UNDEFINED)
      throw Error("mpi: messages are in progress, but MPI has no active request");
  }
  for (std::size_t index = 0; index < static_cast<std::size_t>(count); ++index) {
    const Slot& slot = slots_[static_cast<std::size_t>(done_[index])];
    int bytes = 0;
    if (slot.receives)
      check(MPI_Get_count(&statuses_[index], MPI_BYTE, &bytes), "MPI_Get_count", slot.peer);
    completions_[index] = {done_[index], static_cast<std::size_t>(bytes)};
  }
  return {completions_.data(), static_cast<std::size_t>(count)};
}

class MpiCarrier final : public message::Carrier {
 public:
  explicit MpiCarrier(std::shared_ptr<MpiWorld> world)
      : world_(std::move(world)),
        control_(world_->control_communicator().get()),
        data_(world_->data_communicator().get()) {}

  std::string_view name() const noexcept override { return "mpi"; }
  int rank() const noexcept override { return world_->topology().rank; }
  std::uint32_t generation() const noexcept override { return 0; }
  void require_tags_of(int process_set) const override;

  std::unique_ptr<message::Requests> make_requests(Plane plane) override {
    return std::make_unique<MpiRequests>(plane == Plane::kControl ? control_ : data_, plane);
  }
  std::optional<ProbedMessage> probe(Tag tag) override;
  void progress() override;

  bool delivers_at_once() const noexcept override { return true; }  // on one host
  /// Open MPI may end a process whose new connection is refused.
  bool may_send_to_lost() const noexcept override { return false; }
  bool active() const noexcept override { return is_active(); }
  void farewell() noexcept override { world_->farewell(); }
  void mark_failed() noexcept override { world_->mark_failed(); }
  bool failed() const noexcept override { return world_->failed(); }

 private:
  const std::shared_ptr<MpiWorld> world_;
  const MPI_Comm control_;
  const MPI_Comm data_;
};

void MpiCarrier::require_tags_of(int process_set) const {
  constexpr std::int64_t kTagsPerSet = std::int64_t{1}
                                       << (message::kInstanceBits + message::kKindBits);
  const std::int64_t highest =
      std::min<std::int64_t>(world_->data_communicator().tag_upper_bound(), message::kChannelMask);
  const std::int64_t last = (std::int64_t{process_set} + 1) * kTagsPerSet - 1;
  if (process_set >= 0 && last <= highest) return;
  throw Error(text("mpi: process set ", process_set,
                   " has no message tags: with this MPI they go up to ", highest, ", enough for ",
                   (highest + 1) / kTagsPerSet,
                   " sets over its life, as numbers of removed sets are not used again; keep sets "
                   "instead of removing them and adding them again"));
}

std::optional<ProbedMessage> MpiCarrier::probe(Tag tag) {
  int found = 0;
  const WatchedCall watched("MPI_Improbe");
  MPI_Message matched = MPI_MESSAGE_NULL;
  MPI_Status status = {};
  // Twice, because Open MPI first probes and then receives data from its connections: a single
  // probe would miss a message that has arrived, and the engine would go to sleep.
  for (int attempt = 0; attempt < 2 && !found; ++attempt) {
    check(MPI_Improbe(MPI_ANY_SOURCE, tag_of(tag), control_, &found, &matched, &status),
          "MPI_Improbe");
  }
  if (!found) return std::nullopt;
  MPI_Count bytes = 0;
  check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x", status.MPI_SOURCE);
  if (bytes < 0)
    throw Error(text("a control message from rank ", status.MPI_SOURCE, " has no size"));
  return ProbedMessage{status.MPI_SOURCE, static_cast<std::size_t>(bytes), handle_of(matched)};
}

void MpiCarrier::progress() {
  const WatchedCall watched("MPI_Iprobe");
  int found = 0;
  check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, control_, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
}

}  // namespace

std::shared_ptr<message::Carrier> make_mpi_carrier(std::shared_ptr<MpiWorld> world) {
  return std::make_shared<MpiCarrier>(std::move(world));
}

}  // namespace hvd::mpi
