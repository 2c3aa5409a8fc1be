#include "support/fake_carrier.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "hvd/error.h"
#include "transport/control_plane.h"

namespace hvd::testing {

using message::Completion;
using message::MemoryRelease;
using message::ProbedMessage;
using message::Tag;

void FakeNetwork::deliver(Sent& from, const Posted& to) {
  const std::size_t bytes = std::min(from.bytes.size(), to.room.size());
  if (to.receiver->reader != nullptr) {
    const auto part = from.bytes.first(std::min(from.bytes.size(), to.receiver->expected));
    to.receiver->arrived.assign(part.begin(), part.end());
  } else if (bytes > 0) {
    std::memcpy(to.room.data(), from.bytes.data(), bytes);
  }
  to.receiver->done = true;
  to.receiver->bytes = from.bytes.size();
  from.sender->done = true;
}

class FakeRequests final : public message::Requests {
 public:
  FakeRequests(std::shared_ptr<FakeNetwork> network, int rank)
      : network_(std::move(network)), rank_(rank) {
    ++network_->requests_made_;
  }

  void reset(std::size_t slots) override { ends_.assign(slots, nullptr); }

  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) override {
    const std::lock_guard lock = enter();
    require_reachable(peer);
    ++network_->sent_;
    FakeNetwork::Mailbox& there = network_->mailbox(peer);
    FakeNetwork::Sent message{.tag = tag, .bytes = bytes, .sender = begin(slot)};
    message.sender->receiver = peer;
    const auto waiting = std::find_if(there.posted.begin(), there.posted.end(),
                                      [tag](const auto& posted) { return posted.tag == tag; });
    if (waiting != there.posted.end()) {
      FakeNetwork::deliver(message, *waiting);
      there.posted.erase(waiting);
      return;
    }
    if (bytes.size() <= network_->eager_bytes) {
      message.copy.assign(bytes.begin(), bytes.end());
      message.bytes = message.copy;
      message.sender->done = true;
    }
    there.sent.push_back(std::move(message));
  }

  void receive(std::size_t slot, std::span<std::byte> room, int /*peer*/, Tag tag) override {
    const std::lock_guard lock = enter();
    post({.tag = tag, .room = room, .receiver = begin(slot)});
  }

  bool receive_parts(std::size_t slot, message::PartReader& reader, std::size_t bytes, int /*peer*/,
                     Tag tag) override {
    if (network_->part_bytes == 0) return false;
    const std::lock_guard lock = enter();
    const auto end = begin(slot);
    end->reader = &reader;
    end->expected = bytes;
    post({.tag = tag, .receiver = end});
    return true;
  }

  void receive(std::size_t slot, std::span<std::byte> room, const ProbedMessage& arrival) override {
    const std::lock_guard lock = enter();
    auto& matched = network_->mailbox(rank_).matched;
    const auto found = matched.find(arrival.handle);
    if (found == matched.end()) throw Error("fake: a probed message was received twice");
    FakeNetwork::deliver(found->second, {.room = room, .receiver = begin(slot)});
    ends_[slot]->source = arrival.source;
    matched.erase(found);
  }

  std::span<const Completion> test() override {
    const std::lock_guard lock = enter();
    completions_.clear();
    if (network_->stalled) return completions_;
    failed_slot_ = -1;
    for (std::size_t slot = 0; slot < ends_.size(); ++slot) {
      if (ends_[slot] == nullptr) continue;
      const int source = ends_[slot]->source;
      if (source >= 0 && source == network_->stalled_source) continue;
      if (!ends_[slot]->done) {
        if (completions_.empty()) fail_unless_reachable(slot);
        continue;
      }
      pass_on_parts(*ends_[slot]);
      completions_.push_back({static_cast<int>(slot), ends_[slot]->bytes});
      ends_[slot] = nullptr;
    }
    return completions_;
  }

  int failed_slot() const noexcept override { return failed_slot_; }

  MemoryRelease cancel() noexcept override {
    const std::lock_guard lock(network_->mutex_);
    ++network_->cancel_calls_;
    if (network_->pending_cancels > 0) {
      --network_->pending_cancels;
      return MemoryRelease::kPending;
    }
    if (network_->cancel_result == MemoryRelease::kDone) withdraw();
    return network_->cancel_result;
  }

 private:
  std::lock_guard<std::mutex> enter() {
    if (network_->broken) throw Error("fake: the wire is cut");
    return std::lock_guard(network_->mutex_);
  }
  void require_reachable(int peer) const {
    if (peer < 0 || peer != network_->unreachable) return;
    throw BrokenConnection("fake: sending to rank " + std::to_string(peer) + " failed", peer);
  }
  void fail_unless_reachable(std::size_t slot) {
    const int peer = ends_[slot]->receiver;
    if (peer < 0 || peer != network_->unreachable) return;
    std::erase_if(network_->mailbox(peer).sent,
                  [&](const auto& message) { return message.sender == ends_[slot]; });
    ends_[slot] = nullptr;
    failed_slot_ = static_cast<int>(slot);
    require_reachable(peer);
  }
  std::shared_ptr<FakeNetwork::End> begin(std::size_t slot) {
    if (ends_[slot] != nullptr) throw Error("fake: slot " + std::to_string(slot) + " is not idle");
    return ends_[slot] = std::make_shared<FakeNetwork::End>();
  }
  void post(const FakeNetwork::Posted& posted) {
    FakeNetwork::Mailbox& here = network_->mailbox(rank_);
    const auto waiting = std::find_if(here.sent.begin(), here.sent.end(), [&](const auto& message) {
      return message.tag == posted.tag;
    });
    if (waiting == here.sent.end()) {
      here.posted.push_back(posted);
      return;
    }
    FakeNetwork::deliver(*waiting, posted);
    here.sent.erase(waiting);
  }
  void pass_on_parts(FakeNetwork::End& end) const {
    std::span<const std::byte> rest = end.arrived;
    while (end.reader != nullptr && !rest.empty()) {
      const std::size_t bytes = std::min(rest.size(), network_->part_bytes);
      end.reader->read(rest.first(bytes));
      rest = rest.subspan(bytes);
    }
  }
  void withdraw() noexcept {
    const auto own = [this](const auto& end) {
      return std::find(ends_.begin(), ends_.end(), end) != ends_.end();
    };
    std::erase_if(network_->mailbox(rank_).posted,
                  [&](const auto& posted) { return own(posted.receiver); });
    for (auto& mailbox : network_->mailboxes_)
      std::erase_if(mailbox.sent, [&](const auto& message) { return own(message.sender); });
    std::fill(ends_.begin(), ends_.end(), nullptr);
  }

  const std::shared_ptr<FakeNetwork> network_;
  const int rank_;
  std::vector<std::shared_ptr<FakeNetwork::End>> ends_;  ///< per slot; null: idle
  std::vector<Completion> completions_;
  int failed_slot_ = -1;
};

class FakeCarrier final : public message::Carrier {
 public:
  FakeCarrier(std::shared_ptr<FakeNetwork> network, int rank)
      : network_(std::move(network)), rank_(rank) {}

  std::string_view name() const noexcept override { return "fake"; }
  int rank() const noexcept override { return rank_; }
  std::uint32_t generation() const noexcept override { return network_->generation_; }
  void require_tags_of(int process_set) const override {
    if (process_set < 0 || process_set >= network_->max_process_sets)
      throw Error("fake: process set " + std::to_string(process_set) + " has no message tags");
  }
  std::unique_ptr<message::Requests> make_requests(message::Plane) override {
    return std::make_unique<FakeRequests>(network_, rank_);
  }
  std::optional<ProbedMessage> probe(Tag tag) override {
    if (network_->broken) throw Error("fake: the wire is cut");
    const std::lock_guard lock(network_->mutex_);
    FakeNetwork::Mailbox& here = network_->mailbox(rank_);
    const auto waiting = std::find_if(here.sent.begin(), here.sent.end(), [tag](const auto& one) {
      return message::with_source(one.tag, 0) == message::with_source(tag, 0);
    });
    if (waiting == here.sent.end()) return std::nullopt;
    const ProbedMessage arrival{.source = message::parts_of(waiting->tag).source,
                                .bytes = waiting->bytes.size(),
                                .handle = network_->next_handle_++};
    here.matched.emplace(arrival.handle, std::move(*waiting));
    here.sent.erase(waiting);
    return arrival;
  }
  void progress() override { ++network_->progressed_; }
  bool delivers_at_once() const noexcept override { return network_->delivers_at_once; }
  bool may_send_to_lost() const noexcept override { return network_->may_send_to_lost; }
  bool active() const noexcept override { return true; }
  void farewell() noexcept override { ++network_->farewells_; }
  void mark_failed() noexcept override {
    failed_ = true;
    ++network_->failures_;
  }
  bool failed() const noexcept override { return failed_; }

 private:
  const std::shared_ptr<FakeNetwork> network_;
  const int rank_;
  bool failed_ = false;
};

std::shared_ptr<message::Carrier> FakeNetwork::carrier(int rank) {
  return std::make_shared<FakeCarrier>(shared_from_this(), rank);
}

}  // namespace hvd::testing
