#include "transport/node/mail_ring.h"

#include <algorithm>
#include <cstring>

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::host {
namespace {

constexpr std::size_t kLargest = std::size_t{32} << 10;
constexpr std::size_t kSmallest = std::size_t{1} << 10;
constexpr std::size_t kAllRings = std::size_t{4} << 20;

/// Rounds up, so that sizes lie at multiples of their own size and are never split.
std::uint64_t padded(std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kUnit = sizeof(std::uint64_t);
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

std::size_t MailRing::capacity_for(int ranks) noexcept {
  const auto rings = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks);
  for (std::size_t capacity = kLargest; capacity >= kSmallest; capacity /= 2)
    if (rings * bytes_for(capacity) <= kAllRings) return capacity;
  return 0;
}

MailRing::MailRing(std::byte* memory, std::size_t capacity) noexcept
    : ends_(reinterpret_cast<Ends*>(memory)), bytes_(memory + sizeof(Ends)), capacity_(capacity) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
                "the positions are shared between processes");
}

std::size_t MailRing::room() const noexcept {
  const std::uint64_t used =
      ends_->written.load(std::memory_order_relaxed) - ends_->read.load(std::memory_order_acquire);
  return capacity_ - static_cast<std::size_t>(used);
}

void MailRing::copy_in(std::uint64_t position, std::span<const std::byte> bytes) noexcept {
  const std::size_t begin = position % capacity_;
  const std::size_t first = std::min(bytes.size(), capacity_ - begin);
  if (first > 0) std::memcpy(bytes_ + begin, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(bytes_, bytes.data() + first, bytes.size() - first);
}

void MailRing::copy_out(std::uint64_t position, std::span<std::byte> bytes) const noexcept {
  const std::size_t begin = position % capacity_;
  const std::size_t first = std::min(bytes.size(), capacity_ - begin);
  if (first > 0) std::memcpy(bytes.data(), bytes_ + begin, first);
  if (first < bytes.size()) std::memcpy(bytes.data() + first, bytes_, bytes.size() - first);
}

bool MailRing::write(Size size, std::span<const std::byte> message) noexcept {
  const std::uint64_t needed = sizeof(Size) + padded(message.size());
  if (room() < needed) return false;
  const std::uint64_t begin = ends_->written.load(std::memory_order_relaxed);
  copy_in(begin, std::as_bytes(std::span(&size, 1)));
  copy_in(begin + sizeof(Size), message);
  ends_->written.store(begin + needed, std::memory_order_release);
  return true;
}

bool MailRing::push(std::span<const std::byte> message) noexcept {
  HVD_EXPECT(message.size() <= largest_message(), "the message is not too large for the ring");
  return write(message.size(), message);
}

std::optional<MailRing::Entry> MailRing::pop() {
  const std::uint64_t begin = ends_->read.load(std::memory_order_relaxed);
  const std::uint64_t available = ends_->written.load(std::memory_order_acquire) - begin;
  if (available == 0) return std::nullopt;
  Size size = 0;
  copy_out(begin, std::as_writable_bytes(std::span(&size, 1)));
  Entry entry{.elsewhere = size == kElsewhere};
  if (entry.elsewhere) size = 0;
  const std::uint64_t used = sizeof(Size) + padded(size);
  if (size > largest_message() || used > available || available > capacity_)
    throw Error(text("the memory that the ranks of this host share holds an impossible message of ",
                     size, " bytes; run the same build of hvd on every rank"));
  entry.bytes.resize(size);
  copy_out(begin + sizeof(Size), entry.bytes);
  ends_->read.store(begin + used, std::memory_order_release);
  return entry;
}

}  // namespace hvd::host
