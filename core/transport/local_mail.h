#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "transport/control_plane.h"
#include "transport/node/mail_ring.h"
#include "transport/node/node.h"

namespace hvd::message {

/// The control messages between the ranks of one host, in the rings of its control segment
/// (decision 53). Messages that are too large for a ring go through the carrier. Each of them
/// leaves a marker in the ring, so the messages of a rank keep their order.
///
/// Not thread-safe: only the thread that drives the engine calls it.
class LocalMail {
 public:
  /// Whether a message wakes its receiver: see control::ControlPlane::send_lazily().
  enum class Wake : std::uint8_t { kAlways, kIfAwaited };
  using SendElsewhere = std::function<void(int rank, std::span<const std::byte>)>;

  /// @param send_elsewhere sends a message through the carrier
  /// @param use_rings false: reaches() is always false
  LocalMail(host::Node& node, SendElsewhere send_elsewhere, bool use_rings);

  /// Whether messages to and from this rank pass through here.
  bool reaches(int rank) const noexcept { return peer_of(rank) >= 0; }
  /// Whether reaches() is true for all other ranks of the job.
  bool reaches_all() const noexcept { return reaches_all_; }
  /// Sends, or keeps a copy of the message until flush() finds room for it. @pre reaches(rank)
  /// @throws hvd::Error when the carrier cannot send it
  void send(int rank, std::span<const std::byte> message, Wake wake = Wake::kAlways);
  /// Sends the messages that send() has kept, as far as there is room.
  void flush();
  /// Whether flush() has work.
  bool keeps_messages() const noexcept { return kept_ > 0; }

  bool has_message() noexcept { return !peers_.empty() && node_.own_mail_count() != taken_; }
  /// The next message of a ring, if any.
  std::optional<control::Message> pop();
  /// Whether a message from this rank, which the carrier has received, is the next one.
  bool may_deliver(int source) const noexcept;
  /// Call this when the carrier's message from this rank has been delivered.
  void on_delivered(int source) noexcept;
  /// Whether the carrier has, or will receive, a message of a rank that this class reaches.
  bool awaits_carrier() const noexcept { return awaited_ > 0; }

 private:
  struct Peer {
    int rank = 0;
    host::MailRing incoming, outgoing;
    std::deque<std::vector<std::byte>> kept = {};
    bool awaits_carrier = false;  ///< the carrier has its next message
  };

  int peer_of(int rank) const noexcept;
  bool try_send(Peer&, std::span<const std::byte> message, Wake);

  host::Node& node_;
  const SendElsewhere send_elsewhere_;
  std::vector<int> peer_of_rank_;  ///< index of peers_, or -1; empty without rings
  std::vector<Peer> peers_;
  bool reaches_all_ = false;
  std::size_t next_ = 0;  ///< the peer whose ring pop() checks first
  std::size_t kept_ = 0;
  std::size_t awaited_ = 0;
  std::uint64_t taken_ = 0;  ///< entries of all rings
};

}  // namespace hvd::message
