#include "transport/local_mail.h"

#include <exception>
#include <utility>

#include "base/expect.h"

namespace hvd::message {

LocalMail::LocalMail(host::Node& node, SendElsewhere send_elsewhere, bool use_rings)
    : node_(node), send_elsewhere_(std::move(send_elsewhere)) {
  host::ControlSegment& segment = node_.control_segment();
  const Topology& topology = node_.topology();
  if (!use_rings || !node_.control_segment_shared() || !segment.has_mail_rings()) return;
  peer_of_rank_.assign(static_cast<std::size_t>(topology.size), -1);
  for (int slot = 0; slot < segment.slots(); ++slot) {
    if (slot == topology.local_rank) continue;
    const int rank = node_.rank_of_slot(slot);
    peer_of_rank_[static_cast<std::size_t>(rank)] = static_cast<int>(peers_.size());
    peers_.push_back({.rank = rank,
                      .incoming = segment.mail_ring(slot, topology.local_rank),
                      .outgoing = segment.mail_ring(topology.local_rank, slot)});
  }
  reaches_all_ = topology.local_size == topology.size;
}

int LocalMail::peer_of(int rank) const noexcept {
  return peer_of_rank_.empty() ? -1 : peer_of_rank_[static_cast<std::size_t>(rank)];
}

void LocalMail::send(int rank, std::span<const std::byte> message, Wake wake) {
  HVD_EXPECT(reaches(rank), "the rank is on this host");
  Peer& peer = peers_[static_cast<std::size_t>(peer_of(rank))];
  if (peer.kept.empty() && try_send(peer, message, wake)) return;
  peer.kept.emplace_back(message.begin(), message.end());
  ++kept_;
}

bool LocalMail::try_send(Peer& peer, std::span<const std::byte> message, Wake wake) {
  std::exception_ptr failure;
  if (message.size() <= peer.outgoing.largest_message()) {
    if (!peer.outgoing.push(message)) return false;
  } else {
    if (!peer.outgoing.has_room()) return false;
    try {
      send_elsewhere_(peer.rank, message);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    peer.outgoing.push_elsewhere();
  }
  node_.announce_mail(peer.rank);
  if (wake == Wake::kAlways || node_.awaits_lazy_mail(peer.rank)) node_.ring(peer.rank);
  if (failure) std::rethrow_exception(failure);
  return true;
}

void LocalMail::flush() {
  for (Peer& peer : peers_) {
    while (!peer.kept.empty()) {
      const std::vector<std::byte> message = std::move(peer.kept.front());
      // send_elsewhere_ may throw, so the message leaves the queue first.
      peer.kept.pop_front();
      --kept_;
      if (try_send(peer, message, Wake::kAlways)) continue;
      peer.kept.push_front(message);
      ++kept_;
      break;
    }
  }
}

std::optional<control::Message> LocalMail::pop() {
  if (!has_message()) return std::nullopt;
  for (std::size_t polls = 0; polls < peers_.size(); ++polls) {
    Peer& peer = peers_[next_];
    next_ = (next_ + 1) % peers_.size();
    if (peer.awaits_carrier) continue;
    std::optional<host::MailRing::Entry> entry = peer.incoming.pop();
    if (!entry) continue;
    ++taken_;
    if (!entry->elsewhere) return control::Message{peer.rank, std::move(entry->bytes)};
    peer.awaits_carrier = true;
    ++awaited_;
  }
  return std::nullopt;
}

bool LocalMail::may_deliver(int source) const noexcept {
  const int index = peer_of(source);
  return index < 0 || peers_[static_cast<std::size_t>(index)].awaits_carrier;
}

void LocalMail::on_delivered(int source) noexcept {
  const int index = peer_of(source);
  if (index < 0) return;
  peers_[static_cast<std::size_t>(index)].awaits_carrier = false;
  --awaited_;
}

}  // namespace hvd::message
