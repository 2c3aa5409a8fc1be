#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/fusion_buffer.h"
#include "engine/packer.h"
#include "engine/staging.h"

namespace hvd::runtime {

/// In the host's memory, by the thread that drives the engine, in calls of about kBytesPerCall:
/// what a call does is done when it returns, so there are no events. A batch of one tensor is not
/// copied, unless it is cast or has to be scaled first.
class HostStaging final : public Staging {
 public:
  /// @param pool shared by the queues of a rank; outlives this
  explicit HostStaging(FusionBufferPool& pool) : pool_(pool) {}

  const Staged& stage(const Batch&) override;
  bool pack_part(const Batch&) override;
  bool unpack_part(const Batch&) override;
  EventPtr unstage(const Batch&, EventPtr reduced) override;
  void abandon() noexcept override;
  EventPtr after_both(const EventPtr&, const EventPtr&) override { return nullptr; }

 private:
  bool pack_tensors(const Batch&);
  bool fill_neutral(const Collective&);

  FusionBufferPool& pool_;
  Staged staged_;
  FusionLease input_;   // unless the input is packed into the output's buffer, or is the caller's
  FusionLease output_;  // unless it is the caller's
  std::span<std::byte> packed_;  // where the contribution belongs; empty: where it lies
  PackPosition position_;        // of packing, then of unpacking
  bool unpacks_ = false;         // has begun to
  std::vector<std::span<const std::byte>> input_pieces_;  // kept for their memory
  std::vector<std::span<std::byte>> output_pieces_;
};

}  // namespace hvd::runtime
