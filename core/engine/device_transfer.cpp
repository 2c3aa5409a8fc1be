#include "engine/device_transfer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/expect.h"

namespace hvd::runtime {

DeviceMessages::DeviceMessages(std::shared_ptr<device::Context> device)
    : device_(std::move(device)), stream_(*device_), pool_(*device_, nullptr) {}

DeviceTransfer::DeviceTransfer(DeviceMessages& messages, const TensorView& tensor, EventPtr ready)
    : messages_(messages), tensor_(tensor), ready_(std::move(ready)) {}

DeviceTransfer::~DeviceTransfer() {
  if (host_.memory == nullptr) return;
  if (!pieces_.empty()) host_.free_after = last_copy_;
  messages_.pool_.release(std::move(host_));
}

bool DeviceTransfer::can_begin() {
  if (host_.memory != nullptr) return true;
  if (!device::reached(ready_)) return false;
  ready_.reset();
  const device::DeviceGuard guard(messages_.device_->api(), messages_.device_->device());
  // All messages use one size, so that each can reuse the memory of another.
  if (auto buffer = messages_.pool_.acquire(kSlots * wire::kPieceBytes)) host_ = std::move(*buffer);
  return host_.memory != nullptr;
}

bool DeviceTransfer::idle() const {
  return std::ranges::all_of(pieces_,
                             [](const Piece& piece) { return device::reached(piece.copied); });
}

std::span<std::byte> DeviceTransfer::slot(std::size_t number) const noexcept {
  return {host_.memory + number % kSlots * wire::kPieceBytes, wire::kPieceBytes};
}

void DeviceTransfer::begin_copy(std::size_t bytes, device::Direction direction) {
  device::Context& device = *messages_.device_;
  const device::DeviceGuard guard(device.api(), device.device());
  std::byte* const host = slot(first_ + pieces_.size()).data();
  std::byte* const memory = tensor_.data + begun_;
  const bool to_host = direction == device::Direction::kToHost;
  device.api().copy(to_host ? host : memory, to_host ? memory : host, bytes, direction,
                    messages_.stream_.get());
  last_copy_ = device.events()->record(messages_.stream_.get());
  pieces_.push_back({bytes, last_copy_});
  begun_ += bytes;
}

void DeviceTransfer::pop() noexcept {
  pieces_.pop_front();
  ++first_;
}

std::span<const std::byte> DeviceTransfer::next_piece() {
  if (!can_begin()) return {};
  while (pieces_.size() < kSlots && begun_ < tensor_.bytes())
    begin_copy(std::min(wire::kPieceBytes, tensor_.bytes() - begun_), device::Direction::kToHost);
  if (pieces_.empty() || !device::reached(pieces_.front().copied)) return {};
  return slot(first_).first(pieces_.front().bytes);
}

void DeviceTransfer::release_piece() {
  HVD_EXPECT(!pieces_.empty() && device::reached(pieces_.front().copied), "there is a piece");
  pop();
}

std::span<std::byte> DeviceTransfer::free_slot() noexcept {
  HVD_EXPECT(host_.memory != nullptr, "the transfer can begin");
  if (pieces_.size() == kSlots) return {};
  return slot(first_ + pieces_.size());
}

void DeviceTransfer::copy_to_device(std::size_t bytes) {
  HVD_EXPECT(pieces_.size() < kSlots && begun_ + bytes <= tensor_.bytes(), "there is a free slot");
  begin_copy(bytes, device::Direction::kToDevice);
}

std::size_t DeviceTransfer::take_copied() {
  if (pieces_.empty() || !device::reached(pieces_.front().copied)) return 0;
  const std::size_t bytes = pieces_.front().bytes;
  pop();
  return bytes;
}

std::size_t DeviceTransfer::bytes_under_way() const noexcept {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.bytes;
  return bytes;
}

}  // namespace hvd::runtime
