#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "transport/request_table.h"

namespace hvd::message {

/// Buffers of control messages that are being sent. A message to several ranks is copied once.
///
/// Not thread-safe: only the thread that drives the engine calls it. The destructor cancels
/// messages under way, waits for their memory for at most kCancelTime, and keeps the rest until
/// the process ends.
class SendPool {
 public:
  explicit SendPool(Carrier& carrier) : carrier_(carrier) {}
  SendPool(const SendPool&) = delete;
  SendPool& operator=(const SendPool&) = delete;
  ~SendPool();

  /// Starts to send a copy of `message` to each of `ranks`.
  /// @throws hvd::Error when it cannot be sent to one of them; it is still sent to the others
  void send(std::span<const std::byte> message, std::span<const int> ranks, Tag tag);
  /// Recycles the buffers of sent messages. Calls `ranks_done(ranks)` for each message that did not
  /// complete inside send(): its receivers may have gone to sleep in the meantime.
  /// @throws hvd::Error when a message could not be sent to a rank; all others are still served
  template <typename RanksDone>
  void retire(RanksDone&& ranks_done) {
    std::exception_ptr failure;
    for (std::size_t index = 0; index < active_.size();) {
      bool done = false;
      try {
        done = finished(*active_[index]);
      } catch (const std::exception&) {
        if (!failure) failure = std::current_exception();
      }
      if (!done) {
        ++index;
        continue;
      }
      ranks_done(std::span<const int>(active_[index]->ranks));
      recycle(index);
    }
    if (failure) std::rethrow_exception(failure);
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
