#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "message/request_table.h"

namespace hvd::message {

/// Buffers of messages of the control plane on their way. A message is copied once, however many
/// ranks it goes to.
///
/// Not thread-safe: the thread that drives the engine. The destructor takes back what is still
/// under way, waits for that no longer than kTakeBackTime, and keeps what it does not get.
class SendPool {
 public:
  explicit SendPool(Carrier& carrier) : carrier_(carrier) {}
  SendPool(const SendPool&) = delete;
  SendPool& operator=(const SendPool&) = delete;
  ~SendPool();

  /// Starts to send a copy of `message` to each of `ranks`. @throws hvd::Error when it cannot be
  /// sent to one of them; the others get it
  void send(std::span<const std::byte> message, std::span<const int> ranks, Tag tag);
  /// Recycles what has been sent; `ranks_done(ranks)` is called for each message that completed
  /// here and not at once: its receivers may have gone to sleep meanwhile.
  template <typename RanksDone>
  void retire(RanksDone&& ranks_done) {
    for (std::size_t index = 0; index < active_.size();) {
      if (!finished(*active_[index])) {
        ++index;
        continue;
      }
      ranks_done(std::span<const int>(active_[index]->ranks));
      recycle(index);
    }
  }
  bool empty() const noexcept { return active_.empty(); }

 private:
  struct Parcel {
    explicit Parcel(Carrier& carrier) : requests(carrier, Plane::kControl) {}
    std::vector<std::byte> bytes = {};
    std::vector<int> ranks = {};
    RequestTable requests;  ///< a slot per rank
  };
  static bool finished(Parcel& parcel);
  void recycle(std::size_t index);

  Carrier& carrier_;
  std::vector<std::unique_ptr<Parcel>> active_;
  std::vector<std::unique_ptr<Parcel>> idle_;
};

}  // namespace hvd::message
