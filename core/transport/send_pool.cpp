#include "transport/send_pool.h"

#include <exception>
#include <utility>

#include "base/process_exit.h"

namespace hvd::message {
namespace {

// Limits of the free list: large enough that a busy coordinator does not allocate, and small enough
// that the list keeps at most 4 MiB.
constexpr std::size_t kIdleParcels = 64;
constexpr std::size_t kIdleParcelBytes = 64 * 1024;

}  // namespace

SendPool::~SendPool() {
  // Cancel all messages before waiting for the first, so that they end concurrently.
  for (const auto& parcel : active_) static_cast<void>(parcel->requests.cancel());
  const Deadline deadline = std::chrono::steady_clock::now() + kCancelTime;
  for (auto& parcel : active_) {
    if (!wait_for_memory(parcel->requests, deadline))
      keep_until_exit(std::shared_ptr<const Parcel>(std::move(parcel)));
  }
}

void SendPool::send(std::span<const std::byte> message, std::span<const int> ranks, Tag tag) {
  if (ranks.empty()) return;
  std::unique_ptr<Parcel> parcel;
  if (idle_.empty()) {
    parcel = std::make_unique<Parcel>(carrier_);
  } else {
    parcel = std::move(idle_.back());
    idle_.pop_back();
  }
  parcel->bytes.assign(message.begin(), message.end());
  parcel->ranks.assign(ranks.begin(), ranks.end());
  parcel->requests.reset(ranks.size());
  // Add the parcel before the first send, so that the destructor handles it if a send throws.
  active_.push_back(std::move(parcel));
  Parcel& started = *active_.back();
  std::exception_ptr failure;
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    try {
      started.requests.send(index, started.bytes, ranks[index], tag);
    } catch (const std::exception&) {  // the other ranks still need the message
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  if (finished(started)) recycle(active_.size() - 1);
}

bool SendPool::finished(Parcel& parcel) {
  static_cast<void>(parcel.requests.test());
  return parcel.requests.in_flight() == 0;
}

void SendPool::recycle(std::size_t index) {
  std::unique_ptr<Parcel> parcel = std::move(active_[index]);
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(index));
  if (idle_.size() < kIdleParcels && parcel->bytes.capacity() <= kIdleParcelBytes)
    idle_.push_back(std::move(parcel));
}

}  // namespace hvd::message
