#include "message/send_pool.h"

#include <exception>
#include <utility>

#include "base/kept_memory.h"

namespace hvd::message {
namespace {

// What is kept for the next messages: enough that a busy coordinator allocates nothing, and no more
// than 4 MiB.
constexpr std::size_t kIdleParcels = 64;
constexpr std::size_t kIdleParcelBytes = 64 * 1024;

}  // namespace

SendPool::~SendPool() {
  // All are asked before any is waited for, so that they end side by side.
  for (const auto& parcel : active_) static_cast<void>(parcel->requests.take_back());
  const Deadline deadline = std::chrono::steady_clock::now() + kTakeBackTime;
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
  // Before the first send, so that a failure half-way leaves the parcel where the destructor takes
  // care of it.
  active_.push_back(std::move(parcel));
  Parcel& started = *active_.back();
  std::exception_ptr failure;
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    try {
      started.requests.send(index, started.bytes, ranks[index], tag);
    } catch (const std::exception&) {  // the others are to have it all the same
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
