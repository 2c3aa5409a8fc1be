#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "device/buffers.h"
#include "device/context.h"
#include "engine/staging.h"

namespace hvd::runtime {

/// Staging in a device's memory: one launch packs the tensors (and scales and casts) after their
/// input_ready events, the collective follows, and one launch unpacks. Packing and unpacking use
/// separate streams, so that the next batch is packed while this one is reduced. A batch of one
/// tensor that is not in parts, without a factor or a cast, is passed to the channel unchanged. No
/// call blocks the host.
class DeviceStaging final : public Staging {
 public:
  /// @param channel outlives this
  /// @param folds whether factors of floating types are applied while packing and unpacking
  /// @param fusion_bytes size of the buffers that are allocated ahead of use when the channel has
  /// no buffers of its own; 0: allocate no buffers ahead
  DeviceStaging(device::Context& context, Channel& channel, bool folds, std::size_t fusion_bytes)
      : context_(context),
        channel_(channel),
        folds_(folds),
        fusion_bytes_(fusion_bytes),
        in_(context),
        out_(context),
        buffers_(context),
        channel_buffers_(context.api()) {}
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;
  ~DeviceStaging() override;

  bool ready(const Batch&) override;
  const Staged& stage(const Batch&) override;
  EventPtr unstage(const Batch&, EventPtr reduced) override;
  void abandon() noexcept override;
  EventPtr after_both(const EventPtr&, const EventPtr&) override;

 private:
  void reserve();
  void fold_factors(const Batch&);
  void wait_for_inputs(const Batch&, std::span<const EventPtr> writable);
  void use_tensor(const Batch&);
  bool uses_channel_buffers(const Batch&, std::size_t bytes) const;
  std::span<std::byte> lease_buffers(const Batch&);
  void lease_output(const Batch&, std::size_t bytes);
  void pack(const Batch&, std::span<std::byte> packed);
  EventPtr unpack(const Batch&, const EventPtr& reduced);
  void fill_neutral(std::span<std::byte> contribution);
  template <class Byte>
  void lay_out(const Batch&, std::span<const std::span<Byte>> tensors);
  void add_parts(std::span<const TensorPart>, std::size_t offset);

  device::Context& context_;
  Channel& channel_;
  const bool folds_;
  const std::size_t fusion_bytes_;
  const device::OwnedStream in_;
  const device::OwnedStream out_;
  device::BufferPool buffers_;
  /// The channel's buffers, for fused batches with the same size on all ranks; see
  /// Channel::fusion_buffers().
  device::BufferRing channel_buffers_;
  Staged staged_;
  Conversion conversion_;  // the batch's, with folded factors
  device::BufferLease input_;
  device::BufferLease output_;
  bool output_in_channel_buffer_ = false;  // the output is in the channel's buffer
  bool reserved_ = false;
  std::vector<std::span<const std::byte>> input_pieces_;  // these vectors keep their capacity
  std::vector<std::span<std::byte>> output_pieces_;
  std::vector<device::Piece> pieces_;
};

}  // namespace hvd::runtime
