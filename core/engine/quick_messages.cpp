#include "engine/quick_messages.h"

#include "base/expect.h"
#include "base/spin.h"

namespace hvd::runtime {
namespace {

/// Polls of a sender, which take about 2 us: a receiver that is about to call recv() has called it
/// by then.
constexpr int kSenderPolls = 40;
/// Polls of a receiver, about 10 us, as long as a thread in wait() spins.
constexpr int kReceiverPolls = 150;
/// Polls of a sender whose message is being read, until it lets the engine work.
constexpr int kReaderPolls = 100;

MessageBox::Label label_of(const Message& message) noexcept {
  return {message.tag, static_cast<std::uint64_t>(message.tensor.count),
          static_cast<std::uint32_t>(message.process_set),
          static_cast<std::uint32_t>(message.tensor.dtype)};
}

}  // namespace

// Note [Order of quick messages]
//
// Messages of one source, process set and tag have to match in the order of the calls, whichever
// way they take. A thread passes a quick message during its call, under progress ownership, so it
// is enough that no message of the same key remains from earlier calls:
//
// - The sender has no send outstanding (Engine::pass_quickly()), so the receiver has matched all of
//   its earlier messages. None of them is in a ring or in the receiver's Mailboxes. A later send of
//   this rank begins after this call, when its message has left the box.
// - The receiver has no recv outstanding, and its Mailboxes have no entry with this key: no offer
//   of another rank that a recv from any source would match first, and no place of a call that has
//   stalled.
//
// Calls of several threads of a rank at the same time have no order.

QuickMessages::QuickMessages(control::ControlPlane& control) : control_(control) {
  const int size = control.size();
  peer_of_rank_.assign(static_cast<std::size_t>(size), -1);
  for (int rank = 0; rank < size; ++rank) {
    const auto boxes = control.message_boxes(rank);
    if (!boxes) continue;
    peer_of_rank_[static_cast<std::size_t>(rank)] = static_cast<int>(peers_.size());
    peers_.push_back({rank, boxes->outgoing, boxes->incoming});
    capacity_ = boxes->outgoing.capacity();
  }
}

bool QuickMessages::reaches(int rank) const noexcept {
  return rank >= 0 && static_cast<std::size_t>(rank) < peer_of_rank_.size() &&
         peer_of_rank_[static_cast<std::size_t>(rank)] >= 0;
}

QuickMessages::Peer* QuickMessages::find(int rank) noexcept {
  if (!reaches(rank)) return nullptr;
  return &peers_[static_cast<std::size_t>(peer_of_rank_[static_cast<std::size_t>(rank)])];
}

bool QuickMessages::accepts(const Message& message,
                            const control::ProcessSetTable& sets) const noexcept {
  const TensorView& tensor = message.tensor;
  if (peers_.empty() || !message.name.empty() || message.input_ready || message.keep_alive ||
      message.on_done || tensor.device.type != DeviceType::kCpu)
    return false;
  if (tensor.count < 0 || (tensor.count > 0 && tensor.data == nullptr) ||
      static_cast<std::uint64_t>(tensor.count) > capacity_ / size_of(tensor.dtype))
    return false;
  if (!sets.contains(message.process_set) ||
      sets.position(message.process_set, control_.rank()) < 0)
    return false;
  // Ranks of other hosts have no box, and polling for their messages needs the engine.
  if (message.direction == Direction::kReceive && message.peer == kAnySource)
    return control_.rung_by_all();
  return reaches(message.peer) && sets.position(message.process_set, message.peer) >= 0;
}

bool QuickMessages::send(const Message& message, const std::function<bool()>& step) {
  HVD_EXPECT(reaches(message.peer), "the ranks share a box");
  // Its recv waits in its Mailboxes, which the box does not reach.
  if (control_.awaits_lazy_messages(message.peer)) return false;
  MessageBox& box = find(message.peer)->outgoing;
  box.post(label_of(message), {message.tensor.data, message.tensor.bytes()});
  for (int polls = 0; polls < kSenderPolls; ++polls) {
    if (box.received()) return true;
    relax();
  }
  return end(box, step);
}

/// @return whether the receiver has the message
bool QuickMessages::end(MessageBox& box, const std::function<bool()>& step) {
  for (int polls = 0; !box.retract(); ++polls) {
    if (box.received()) return true;
    if (polls < kReaderPolls) {
      relax();
      continue;
    }
    // The receiver's thread has lost its core, or its process was stopped or has ended.
    waits_for_reader_ = true;
    const bool runs = step();
    waits_for_reader_ = false;
    if (!runs) return false;
  }
  return false;
}

std::optional<int> QuickMessages::receive(const Message& message,
                                          const control::ProcessSetTable& sets,
                                          const std::function<bool()>& interrupted) {
  const MessageBox::Label label = label_of(message);
  const std::span memory(message.tensor.data, message.tensor.bytes());
  const bool any = message.peer == kAnySource;
  Peer* const first = any ? peers_.data() : find(message.peer);
  HVD_EXPECT(first != nullptr, "the ranks share a box");
  Peer* const last = any ? first + peers_.size() : first + 1;
  for (int polls = 0; polls < kReceiverPolls; ++polls) {
    for (Peer* peer = first; peer != last; ++peer) {
      if (!peer->incoming.full()) continue;
      if (any && sets.position(message.process_set, peer->rank) < 0) continue;
      const MessageBox::Found found = peer->incoming.begin(label);
      if (found == MessageBox::Found::kOther) return std::nullopt;
      if (found == MessageBox::Found::kNothing) continue;
      peer->incoming.end(memory);
      return peer->rank;
    }
    if (interrupted()) break;
    relax();
  }
  return std::nullopt;
}

}  // namespace hvd::runtime
