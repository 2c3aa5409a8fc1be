#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "execution/fusion_buffer.h"
#include "execution/staging.h"

namespace hvd::runtime {

/// In the host's memory, by the thread that drives the engine: what it does is done when a call
/// returns, so there are no events. A batch of one tensor is not copied, unless it is cast or has
/// to be scaled first.
class HostStaging final : public Staging {
 public:
  /// @param pool shared by the queues of a rank; outlives this
  explicit HostStaging(FusionBufferPool& pool) : pool_(pool) {}

  const Staged& stage(const Batch&) override;
  EventPtr unstage(const Batch&, EventPtr reduced) override;
  void abandon() noexcept override;
  EventPtr after_both(const EventPtr&, const EventPtr&) override { return nullptr; }

 private:
  void pack_tensors(const Batch&, std::span<std::byte> packed);
  static void fill_neutral(const Collective&, std::span<std::byte> contribution);

  FusionBufferPool& pool_;
  Staged staged_;
  FusionLease input_;   // unless the input is packed into the output's buffer, or is the caller's
  FusionLease output_;  // unless it is the caller's
  std::vector<std::span<const std::byte>> input_pieces_;  // kept for their memory
  std::vector<std::span<std::byte>> output_pieces_;
};

}  // namespace hvd::runtime
