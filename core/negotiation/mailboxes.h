#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "hvd/status.h"
#include "negotiation/point_messages.h"

namespace hvd::control {

/// The source of a recv that accepts a message of any rank.
inline constexpr int kAnyRank = -1;

/// An offer of another rank. It owns its payload.
struct Arrival {
  int source = 0;
  wire::Offer offer = {};  ///< its span refers to `payload`
  std::vector<std::byte> payload = {};

  Arrival() = default;
  Arrival(int from, const wire::Offer& received)
      : source(from), offer(received), payload(received.payload.begin(), received.payload.end()) {
    offer.payload = payload;
  }
  // Moving a vector keeps the address of its elements.
  Arrival(Arrival&&) = default;
  Arrival& operator=(Arrival&&) = default;
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;
  ~Arrival() = default;
};

/// Matches the offers that have arrived at a rank with the recvs that its program has started. The
/// receiver alone decides which message a recv gets, so that both sides agree on it.
///
/// Offers of one source and key match in the order of the sends, and recvs in the order of the
/// calls. A stalled recv and a recalled send keep their places in these orders: the next offer or
/// recv that would have matched one of them ends with its error.
///
/// Pure, not thread-safe.
class Mailboxes {
 public:
  /// The immediate outcome of a new recv: an offer, the error of a recalled send, or none.
  using Delivery = std::variant<std::monostate, Arrival, Status>;
  /// @param recv identifies the recv in later calls
  /// @param source a world rank or kAnyRank
  Delivery post(std::uint64_t recv, const wire::MessageKey&, int source);

  /// The immediate outcome of a new offer: a recv, the error of a stalled one, or none. The offer
  /// is moved from if it has to wait.
  using Reception = std::variant<std::monostate, std::uint64_t, Status>;
  Reception arrive(Arrival&&);

  /// Removes a recv that waits. @return whether it waited
  bool remove(std::uint64_t recv, const wire::MessageKey&);
  /// Removes a recv that waits; the next offer that would have matched it ends with `error`.
  void stall(std::uint64_t recv, const wire::MessageKey&, const Status& error);

  /// The offer that waits, or null. Valid until the next call.
  const wire::Offer* find(int source, std::uint64_t send) const;
  /// Removes an offer that waits. @return whether it waited
  bool withdraw(int source, std::uint64_t send);
  /// Removes an offer that waits; the next recv that would have matched it ends with `error`.
  /// @return whether it waited
  bool recall(int source, std::uint64_t send, const Status& error);
  /// Visits the offers that wait.
  void for_each_offer(const std::function<void(int source, const wire::Offer&)>&) const;

  bool empty() const noexcept { return boxes_.empty(); }
  /// Whether a recv or offer of this key waits, or the place of one that has ended remains.
  bool has(const wire::MessageKey& key) const { return boxes_.contains(key); }
  /// Bytes of payload that wait for a recv.
  std::size_t buffered_bytes() const noexcept { return buffered_; }

 private:
  struct Recv {
    std::uint64_t id = 0;
    int source = kAnyRank;
    std::optional<Status> stalled = {};  ///< it has ended with this error and keeps its place
  };
  struct Sent {
    Arrival arrival;
    std::optional<Status> recalled = {};
  };
  // The unmatched messages of a key.
  struct Box {
    std::deque<Recv> recvs;
    std::deque<Sent> offers;
  };
  using Boxes = std::map<wire::MessageKey, Box>;

  void subtract_payload(const Arrival& arrival) noexcept { buffered_ -= arrival.payload.size(); }
  void drop_if_empty(Boxes::iterator);
  std::deque<Sent>::iterator find_offer(Box&, int source, std::uint64_t send);

  Boxes boxes_;
  std::map<std::pair<int, std::uint64_t>, wire::MessageKey> waiting_;  ///< keys of waiting offers
  std::size_t buffered_ = 0;
};

}  // namespace hvd::control
