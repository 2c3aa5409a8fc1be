#include <algorithm>
#include <cstring>
#include <utility>

#include "base/process_exit.h"
#include "base/text.h"
#include "engine/point_to_point.h"
#include "hvd/error.h"

// Sends and recvs of tensors on the GPU. Their pieces pass through pinned host memory.

namespace hvd::runtime {

std::unique_ptr<DeviceTransfer> PointToPoint::transfer_of(const TensorView& tensor,
                                                          const OperationState& operation) {
  if (tensor.device.type == DeviceType::kCpu || tensor.bytes() == 0) return nullptr;
  if (!device_messages_) device_messages_ = std::make_unique<DeviceMessages>(parts_.device);
  return std::make_unique<DeviceTransfer>(*device_messages_, tensor,
                                          operation.submission.input_ready);
}

std::span<const std::byte> PointToPoint::next_piece(Send& sent) {
  if (!sent.device) {
    const std::size_t bytes = std::min(wire::kPieceBytes, sent.bytes - sent.sent);
    return {sent.operation->submission.input.data + sent.sent, bytes};
  }
  const std::span<const std::byte> piece = sent.device->next_piece();
  if (piece.empty()) awaits_device_ = true;
  return piece;
}

std::span<std::byte> PointToPoint::slot_of(int source, Recv& recv, std::size_t bytes) {
  const std::span<std::byte> slot =
      recv.accepted ? recv.device->free_slot() : std::span<std::byte>();
  if (slot.size() < bytes) refuse_message(source, "sends more pieces than were confirmed");
  return slot.first(bytes);
}

bool PointToPoint::advance_device() {
  bool moved = false;
  for (auto next = device_recvs_.begin(); next != device_recvs_.end();) {
    Recv& recv = recvs_.at(*next++);  // it may end
    moved = advance_device(recv) || moved;
  }
  return moved;
}

bool PointToPoint::advance_device(Recv& recv) {
  if (!recv.accepted) {
    if (!recv.device->can_begin()) {
      awaits_device_ = true;
      return false;
    }
    recv.accepted = true;
    if (recv.payload.empty()) {
      offer_window(recv.source);
      send(recv.source, wire::Received{recv.send, 0});
      return true;
    }
    std::memcpy(recv.device->free_slot().data(), recv.payload.data(), recv.payload.size());
    recv.device->copy_to_device(recv.payload.size());
  }
  bool moved = false;
  while (const std::size_t bytes = recv.device->take_copied()) {
    moved = true;
    const bool last = recv.received + bytes == recv.bytes;
    confirm_piece(recv.source, recv.send, bytes);
    if (last) return true;
  }
  if (recv.device->bytes_under_way() > 0) awaits_device_ = true;
  return moved;
}

void PointToPoint::check_device(bool moved, TimePoint now) {
  if (moved || !awaits_device_) return device_waits_since_.reset();
  if (!device_waits_since_) device_waits_since_ = now;
  const Duration limit = options_.stall_shutdown;
  if (limit == Duration::zero() || now - *device_waits_since_ < limit) return;
  throw PeerLostError(
      text("rank ", rank_, " ", state_text(), "; expected its GPU to complete that within ",
           text(limit),
           " (HVD_STALL_SHUTDOWN); the GPU hangs, or the program computes for longer than that"),
      -1);
}

void PointToPoint::finish(const OperationPtr& operation,
                          const std::unique_ptr<DeviceTransfer>& device, const Status& status) {
  keep_memory(operation, device);
  parts_.finish(operation, status, device && status.ok() ? device->last_copy() : nullptr);
}

void PointToPoint::keep_memory(const OperationPtr& operation,
                               const std::unique_ptr<DeviceTransfer>& device) {
  if (device && !device->idle()) keep_until_exit(std::move(operation->submission.keep_alive));
}

}  // namespace hvd::runtime
