#include "transport/ucx/ucx_carrier.h"

#include <string>
#include <utility>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/ucx/connections.h"

// Note [How a message is cancelled]
// A send that waits for a connection has not begun, and an unmatched receive can be cancelled. UCX
// can cancel other messages only by closing their connections by force, which may end live
// processes: Note [A worker that is not ended]. Therefore the worker of a cancelled message stops
// making progress. This rank then no longer sends, or no longer receives, messages of that plane;
// the other plane continues. Messages are only cancelled when the job ends.

namespace hvd::ucx {
namespace {

using message::Completion;
using message::MemoryRelease;
using message::Plane;
using message::ProbedMessage;
using message::SlotState;
using message::Tag;

/// Limit of progress calls per test() or probe(), so that the engine can continue.
constexpr int kMaxProgressRounds = 100;

class UcxRequests final : public message::Requests, private MessageOwner {
 public:
  UcxRequests(std::shared_ptr<Connections> connections, Plane plane)
      : connections_(std::move(connections)),
        plane_(plane),
        in_(in_of(plane)),
        out_(out_of(plane)) {
    connections_->add(*this);
  }
  UcxRequests(const UcxRequests&) = delete;
  UcxRequests& operator=(const UcxRequests&) = delete;
  ~UcxRequests() override {
    drop_all();
    connections_->remove(*this);
  }

  void reset(std::size_t slots) override;
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, const ProbedMessage& arrival) override;
  bool receive_parts(std::size_t slot, message::PartReader&, std::size_t bytes, int peer,
                     Tag tag) override;
  std::span<const Completion> test() override;
  int failed_slot() const noexcept override { return failed_; }
  MemoryRelease cancel() noexcept override;

 private:
  struct Slot {
    SlotState state = SlotState::kIdle;
    int peer = 0;
    Outgoing sent = {};
    Parts parts = {};
    void* received = nullptr;  ///< request of a receive; null: over, not yet returned by test()
    Status status = kOk;       ///< of a receive that is over
    std::size_t bytes = 0;
    bool break_reported = false;  ///< test() has thrown because the receive's connection broke
  };

  void drop(Side) noexcept override;
  void drop_all() noexcept;
  void start_receive(std::size_t slot, int peer, const StartResult&);
  bool under_way(const Slot& slot) const noexcept {
    return slot.received != nullptr || slot.sent.stage != Outgoing::Stage::kOver;
  }
  void update(Slot&);
  void collect();
  void collect_from(std::size_t index);
  [[noreturn]] void fail(std::size_t index);

  const std::shared_ptr<Connections> connections_;
  const Plane plane_;
  const Side in_;
  const Side out_;
  std::vector<Slot> slots_;
  std::vector<Completion> completions_;
  int under_way_ = 0;
  int receiving_ = 0;  ///< receives among them
  int failed_ = -1;    ///< slot of the message whose failure test() has thrown
  bool kept_ = false;  ///< memory of a cancelled message may still be accessed
};

void UcxRequests::reset(std::size_t slots) {
  HVD_EXPECT(under_way_ == 0, "no message is under way");
  slots_.assign(slots, Slot{});
  completions_.clear();
  completions_.reserve(slots);
}

void UcxRequests::send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) {
  Slot& begun = slots_[slot];
  HVD_EXPECT(begun.state == SlotState::kIdle, "the slot has no message under way");
  begun.sent.bytes = bytes;
  begun.sent.tag = tag;
  connections_->send(plane_, peer, begun.sent);
  if (begun.sent.stage == Outgoing::Stage::kOver && begun.sent.status != kOk)
    connections_->raise("sending to", peer, begun.sent.status);
  begun.state = SlotState::kSending;
  begun.peer = peer;
  ++under_way_;
}

void UcxRequests::start_receive(std::size_t slot, int peer, const StartResult& started) {
  Slot& begun = slots_[slot];
  HVD_EXPECT(begun.state == SlotState::kIdle, "the slot has no message under way");
  if (started.request == nullptr && started.status != kOk)
    connections_->raise("receiving from", peer, started.status);
  begun.state = SlotState::kReceiving;
  begun.peer = peer;
  begun.received = started.request;
  ++under_way_;
  ++receiving_;
}

void UcxRequests::receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) {
  start_receive(slot, peer, connections_->worker(in_).receive(bytes, tag));
}

void UcxRequests::receive(std::size_t slot, std::span<std::byte> bytes,
                          const ProbedMessage& arrival) {
  void* const message = reinterpret_cast<void*>(static_cast<std::uintptr_t>(arrival.handle));
  start_receive(slot, arrival.source, connections_->worker(in_).receive(bytes, message));
}

// A stopped worker calls no reader, but hardware that writes by itself continues, and two network
// cards could deliver the parts in another order.
bool UcxRequests::receive_parts(std::size_t slot, message::PartReader& reader, std::size_t bytes,
                                int peer, Tag tag) {
  if (!connections_->stopping_releases_memory()) return false;
  Parts& parts = slots_[slot].parts;
  parts = {.reader = &reader, .bytes = bytes};
  const StartResult started = connections_->worker(in_).receive(parts, tag);
  if (started.request == nullptr && started.status == kUnsupported) return false;
  start_receive(slot, peer, started);
  return true;
}

void UcxRequests::update(Slot& slot) {
  if (slot.state == SlotState::kSending) return connections_->advance(plane_, slot.peer, slot.sent);
  if (slot.received == nullptr) return;
  Worker& worker = connections_->worker(in_);
  const Status status = worker.status_of_receive(slot.received, slot.bytes);
  if (status == kInProgress) return;
  worker.free(std::exchange(slot.received, nullptr));
  slot.status = status;
}

void UcxRequests::collect() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].state == SlotState::kIdle) continue;
    update(slots_[index]);
    collect_from(index);
  }
}

// Completions are returned before a failure is thrown, because the exception would drop them. The
// failed message keeps its slot until the next call.
void UcxRequests::collect_from(std::size_t index) {
  Slot& slot = slots_[index];
  const bool receives = slot.state == SlotState::kReceiving;
  if (under_way(slot)) {
    // A receive on a broken connection would never complete.
    const Status failure = receives ? connections_->failure_of_receives(plane_, slot.peer) : kOk;
    if (failure == kOk || slot.break_reported || !completions_.empty()) return;
    slot.break_reported = true;
    connections_->raise("receiving from", slot.peer, failure);
  }
  const Status status = receives ? slot.status : slot.sent.status;
  if (status != kOk) return completions_.empty() ? fail(index) : void();
  completions_.push_back({static_cast<int>(index), slot.bytes});
  slot = {};
  --under_way_;
  receiving_ -= receives ? 1 : 0;
}

void UcxRequests::fail(std::size_t index) {
  const Slot failed = std::exchange(slots_[index], {});
  const bool receives = failed.state == SlotState::kReceiving;
  --under_way_;
  receiving_ -= receives ? 1 : 0;
  failed_ = static_cast<int>(index);
  if (receives && failed.status == kTruncated) {
    throw Error(text("ucx: rank ", failed.peer,
                     " sent a longer message than expected; do all ranks run the same build with "
                     "the same settings?"));
  }
  connections_->raise(receives ? "receiving from" : "sending to", failed.peer,
                      receives ? failed.status : failed.sent.status);
}

std::span<const Completion> UcxRequests::test() {
  HVD_EXPECT(under_way_ > 0, "a message is under way");
  completions_.clear();
  failed_ = -1;
  for (int round = 0; round < kMaxProgressRounds; ++round) {
    const bool moved = connections_->progress(plane_, receiving_ > 0);
    collect();
    if (!completions_.empty() || !moved) break;
  }
  return completions_;
}

MemoryRelease UcxRequests::cancel() noexcept {
  bool sends = false;
  bool receives = false;
  for (Slot& slot : slots_) {
    if (!under_way(slot)) continue;
    if (slot.state == SlotState::kReceiving) {
      connections_->worker(in_).cancel_receive(slot.received);
      update(slot);
      receives = receives || under_way(slot);
    } else if (slot.sent.stage == Outgoing::Stage::kWaiting) {
      connections_->drop(plane_, slot.peer, slot.sent);
    } else {
      update(slot);
      sends = sends || under_way(slot);
    }
  }
  if (sends) connections_->stop(out_);
  if (receives) connections_->stop(in_);
  if ((sends || receives) && !connections_->stopping_releases_memory()) kept_ = true;
  drop_all();
  return kept_ ? MemoryRelease::kNever : MemoryRelease::kDone;
}

void UcxRequests::drop(Side side) noexcept {
  for (Slot& slot : slots_) {
    if (!under_way(slot)) continue;
    if (slot.state == SlotState::kSending && side == out_)
      connections_->drop(plane_, slot.peer, slot.sent);
    if (slot.state == SlotState::kReceiving && side == in_) {
      connections_->worker(in_).free(std::exchange(slot.received, nullptr));
      slot.status = kCancelled;
    }
  }
}

void UcxRequests::drop_all() noexcept {
  drop(out_);
  drop(in_);
  for (Slot& slot : slots_) slot = {};
  under_way_ = 0;
  receiving_ = 0;
}

class UcxCarrier final : public message::Carrier {
 public:
  UcxCarrier(Workers workers, JobMembers members)
      : connections_(std::make_shared<Connections>(std::move(workers), std::move(members))) {}
  UcxCarrier(const UcxCarrier&) = delete;
  UcxCarrier& operator=(const UcxCarrier&) = delete;
  ~UcxCarrier() override {
    if (left_in_order_ && !failed_) connections_->leave();
    connections_->stop();  // requests that are never released may hold the connections
  }

  std::string_view name() const noexcept override { return "ucx"; }
  int rank() const noexcept override { return connections_->rank(); }
  std::uint32_t generation() const noexcept override { return connections_->generation(); }
  void require_tags_of(int process_set) const override;

  std::unique_ptr<message::Requests> make_requests(Plane plane) override {
    return std::make_unique<UcxRequests>(connections_, plane);
  }
  std::optional<ProbedMessage> probe(Tag tag) override;
  void connect(Plane plane, int rank) override { connections_->connect_ahead(plane, rank); }
  bool connecting() const noexcept override { return connections_->connecting(); }
  void check_connections(const std::function<bool(int)>& concerns) override {
    connections_->require_all_connected(concerns);
  }
  void progress() override;
  bool delivers_at_once() const noexcept override { return false; }
  bool may_send_to_lost() const noexcept override { return true; }

  bool active() const noexcept override {
    return !connections_->ended(Side::kControlIn) && !connections_->ended(Side::kControlOut);
  }
  void farewell() noexcept override { left_in_order_ = true; }
  void mark_failed() noexcept override { failed_ = true; }
  bool failed() const noexcept override { return failed_; }

 private:
  const std::shared_ptr<Connections> connections_;
  bool left_in_order_ = false;
  bool failed_ = false;
};

void UcxCarrier::require_tags_of(int process_set) const {
  if (process_set >= 0 && process_set < message::kMaxProcessSets) return;
  throw Error(text("ucx: process set ", process_set, " has no message tags: there are enough for ",
                   message::kMaxProcessSets,
                   " sets in a job, as numbers of removed sets are not used again; keep sets "
                   "instead of removing them and adding them again"));
}

std::optional<ProbedMessage> UcxCarrier::probe(Tag tag) {
  Worker& worker = connections_->worker(Side::kControlIn);
  for (int round = 0; round < kMaxProgressRounds; ++round) {
    if (const auto found = worker.probe(tag, ~message::kSourceMask)) {
      return ProbedMessage{.source = message::parts_of(found->tag).source,
                           .bytes = found->bytes,
                           .handle = reinterpret_cast<std::uintptr_t>(found->message)};
    }
    if (!connections_->progress(Plane::kControl, true)) break;
  }
  return std::nullopt;
}

void UcxCarrier::progress() {
  for (const Side side : {Side::kControlIn, Side::kControlOut, Side::kDataIn, Side::kDataOut})
    if (!connections_->ended(side)) static_cast<void>(connections_->run(side));
}

}  // namespace

std::shared_ptr<message::Carrier> make_ucx_carrier(Workers workers, JobMembers members) {
  return std::make_shared<UcxCarrier>(std::move(workers), std::move(members));
}

}  // namespace hvd::ucx
