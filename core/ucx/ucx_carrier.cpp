#include "ucx/ucx_carrier.h"

#include <chrono>
#include <string>
#include <utility>

#include "base/expect.h"
#include "base/poll_until.h"
#include "hvd/error.h"
#include "ucx/connections.h"

// Note [How a message is taken back]
// UCX cannot cancel a send, nor a receive that has been matched. Both end, with an error, when the
// endpoint between the two ranks is closed by force; that takes microseconds, whatever the peer
// does. The exception is a receive that has part of a message which was sent in several fragments
// without a rendezvous (which ones are, UCX decides): nothing completes it once the sender is gone.
// So after kCloseTime the worker is abandoned, and with it all that could write anywhere. Nobody
// takes messages back in a job that goes on.

namespace hvd::ucx {
namespace {

using message::Arrival;
using message::Completion;
using message::Plane;
using message::Tag;
using message::TakenBack;

/// How long closed endpoints are given to end what was under way.
constexpr auto kCloseTime = std::chrono::milliseconds(300);
/// One look lets UCX work for so often at most: others want their turn.
constexpr int kMostRounds = 100;

class UcxRequests final : public message::Requests, private Pending {
 public:
  UcxRequests(std::shared_ptr<Connections> connections, Plane plane)
      : connections_(std::move(connections)), plane_(plane) {
    connections_->add(*this);
  }
  UcxRequests(const UcxRequests&) = delete;
  UcxRequests& operator=(const UcxRequests&) = delete;
  ~UcxRequests() override {
    forget();
    connections_->remove(*this);
  }

  void reset(std::size_t slots) override;
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) override;
  void receive(std::size_t slot, std::span<std::byte> bytes, const Arrival& arrival) override;
  std::span<const Completion> test() override;
  TakenBack take_back() noexcept override;

 private:
  enum class State : std::uint8_t { kIdle, kSending, kReceiving };
  struct Slot {
    State state = State::kIdle;
    int peer = 0;
    void* request = nullptr;  ///< null: it is over, and test() has not said so
    Status status = kOk;      ///< of one that is over
    std::size_t bytes = 0;
  };

  void forget() noexcept override;
  void begin(std::size_t slot, State, int peer, const Started&);
  void look_at(Slot&);
  void collect();
  void begin_to_take_back() noexcept;

  const std::shared_ptr<Connections> connections_;
  const Plane plane_;
  std::vector<Slot> slots_;
  std::vector<Completion> completions_;
  int under_way_ = 0;
  bool taking_back_ = false;
  Deadline end_at_;
};

void UcxRequests::reset(std::size_t slots) {
  HVD_EXPECT(under_way_ == 0, "nothing is under way");
  slots_.assign(slots, Slot{});
  completions_.clear();
  completions_.reserve(slots);
  taking_back_ = false;
}

void UcxRequests::begin(std::size_t slot, State state, int peer, const Started& started) {
  HVD_EXPECT(slots_[slot].state == State::kIdle, "the slot has no message under way");
  if (started.request == nullptr && started.status != kOk) {
    connections_->raise(state == State::kSending ? "sending to" : "receiving from", peer,
                        started.status);
  }
  slots_[slot] = {.state = state, .peer = peer, .request = started.request};
  ++under_way_;
}

void UcxRequests::send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) {
  const Endpoint endpoint = connections_->endpoint(plane_, peer);
  begin(slot, State::kSending, peer, connections_->worker().send(endpoint, bytes, tag));
}

void UcxRequests::receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) {
  // What ends a receive, and tells of the peer's end, is a connection of our own. If there can be
  // none, the message may be here already.
  static_cast<void>(connections_->connect(plane_, peer));
  begin(slot, State::kReceiving, peer, connections_->worker().receive(bytes, tag));
}

void UcxRequests::receive(std::size_t slot, std::span<std::byte> bytes, const Arrival& arrival) {
  void* const message = reinterpret_cast<void*>(static_cast<std::uintptr_t>(arrival.handle));
  begin(slot, State::kReceiving, arrival.source, connections_->worker().receive(bytes, message));
}

/// @pre the slot has a request
void UcxRequests::look_at(Slot& slot) {
  HVD_EXPECT(slot.request != nullptr, "the slot has a request");
  Worker& worker = connections_->worker();
  const Status status = slot.state == State::kSending
                            ? worker.status_of_send(slot.request)
                            : worker.status_of_receive(slot.request, slot.bytes);
  if (status == kInProgress) return;
  worker.free(std::exchange(slot.request, nullptr));
  slot.status = status;
}

void UcxRequests::collect() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (slot.state == State::kIdle) continue;
    const bool receives = slot.state == State::kReceiving;
    if (slot.request != nullptr) {
      look_at(slot);
      // A receive would wait for a peer that is gone.
      if (slot.request != nullptr && receives) {
        const Status failure = connections_->failure(plane_, slot.peer);
        if (failure != kOk) connections_->raise("receiving from", slot.peer, failure);
      }
    }
    if (slot.request != nullptr) continue;
    if (slot.status == kTruncated) {
      throw Error("ucx: rank " + std::to_string(slot.peer) +
                  " sent a longer message than was expected; do all ranks run the same build with "
                  "the same settings?");
    }
    if (slot.status != kOk)
      connections_->raise(receives ? "receiving from" : "sending to", slot.peer, slot.status);
    completions_.push_back({static_cast<int>(index), slot.bytes});
    slot = {};
    --under_way_;
  }
}

std::span<const Completion> UcxRequests::test() {
  HVD_EXPECT(under_way_ > 0, "something is under way");
  completions_.clear();
  for (int round = 0; round < kMostRounds; ++round) {
    const bool moved = connections_->worker().progress();
    collect();
    if (!completions_.empty() || !moved) break;
  }
  return completions_;
}

void UcxRequests::begin_to_take_back() noexcept {
  Worker& worker = connections_->worker();
  for (const Slot& slot : slots_) {
    if (slot.request == nullptr) continue;
    if (slot.state == State::kReceiving) worker.cancel_receive(slot.request);
    connections_->close_by_force(plane_, slot.peer);
  }
  taking_back_ = true;
  end_at_ = std::chrono::steady_clock::now() + kCloseTime;
}

TakenBack UcxRequests::take_back() noexcept {
  if (!connections_->ended() && under_way_ > 0) {
    if (!taking_back_) begin_to_take_back();
    static_cast<void>(connections_->worker().progress());
    for (Slot& slot : slots_) {
      if (slot.request == nullptr) continue;
      look_at(slot);
      if (slot.request == nullptr) continue;
      if (std::chrono::steady_clock::now() < end_at_) return TakenBack::kPending;
      connections_->abandon();  // forgets the rest
      break;
    }
  }
  forget();
  return TakenBack::kDone;
}

/// UCX frees a request that is under way when it ends.
void UcxRequests::forget() noexcept {
  for (Slot& slot : slots_) {
    if (slot.request != nullptr) connections_->worker().free(slot.request);
    slot = {};
  }
  under_way_ = 0;
  taking_back_ = false;
}

class UcxCarrier final : public message::Carrier {
 public:
  UcxCarrier(std::unique_ptr<Worker> worker, Membership members)
      : connections_(std::make_shared<Connections>(std::move(worker), std::move(members))) {}
  UcxCarrier(const UcxCarrier&) = delete;
  UcxCarrier& operator=(const UcxCarrier&) = delete;
  ~UcxCarrier() override {
    if (said_farewell_ && !failed_) connections_->leave();
    connections_->abandon();  // also where requests that are kept for good hold the connections
  }

  std::string_view name() const noexcept override { return "ucx"; }
  int rank() const noexcept override { return connections_->rank(); }
  std::uint32_t generation() const noexcept override { return connections_->generation(); }
  void require_tags_of(int process_set) const override;

  std::unique_ptr<message::Requests> make_requests(Plane plane) override {
    return std::make_unique<UcxRequests>(connections_, plane);
  }
  std::optional<Arrival> probe(Tag tag) override;
  void progress() override { static_cast<void>(connections_->worker().progress()); }

  bool active() const noexcept override { return !connections_->ended(); }
  void farewell() noexcept override { said_farewell_ = true; }
  void mark_failed() noexcept override { failed_ = true; }
  bool failed() const noexcept override { return failed_; }

 private:
  const std::shared_ptr<Connections> connections_;
  bool said_farewell_ = false;
  bool failed_ = false;
};

void UcxCarrier::require_tags_of(int process_set) const {
  if (process_set >= 0 && process_set < message::kMostProcessSets) return;
  throw Error("ucx: process set " + std::to_string(process_set) +
              " has no message tags: there are enough for " +
              std::to_string(message::kMostProcessSets) +
              " sets over a job's life, as numbers of removed sets are not used again; keep sets "
              "instead of adding them anew");
}

std::optional<Arrival> UcxCarrier::probe(Tag tag) {
  Worker& worker = connections_->worker();
  for (int round = 0; round < kMostRounds; ++round) {
    if (const auto found = worker.probe(tag, ~message::kSourceMask)) {
      return Arrival{.source = message::parts_of(found->tag).source,
                     .bytes = found->bytes,
                     .handle = reinterpret_cast<std::uintptr_t>(found->message)};
    }
    if (!worker.progress()) break;
  }
  return std::nullopt;
}

}  // namespace

std::shared_ptr<message::Carrier> make_ucx_carrier(std::unique_ptr<Worker> worker,
                                                   Membership members) {
  return std::make_shared<UcxCarrier>(std::move(worker), std::move(members));
}

}  // namespace hvd::ucx
