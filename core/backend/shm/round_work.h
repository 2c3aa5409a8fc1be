#pragma once

#include <memory>
#include <span>

#include "backend/shm/shm_lane.h"

namespace hvd::shm {

/// A collective in rounds of at most a slot per member:
///
///   fill     copies this member's input of the round into its slot     once nobody needs what the slot held two rounds ago
///   process  reduces or copies what all have put into their slots      once all have filled
///   take     copies the common result out (allreduce only)             once all have processed
///
/// Two buffers let a member fill one round while others still work on the one before. The numbers of rounds go on from one collective to
/// the next, so nothing is ever reset.
class RoundWork : public Work {
 public:
  RoundWork(std::shared_ptr<Lane> lane, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : collective_(collective), in_(in), out_(out), lane_(std::move(lane)), base_(lane_->next_round) {}
  bool progress() final;

 protected:
  virtual void fill(std::uint64_t round) = 0;
  virtual void process(std::uint64_t round) = 0;
  virtual void take(std::uint64_t /*round*/) {}

  Lane& lane() noexcept { return *lane_; }
  std::byte* slot(std::uint64_t round, int member) noexcept { return lane_->slot(base_ + round, member); }
  std::byte* result(std::uint64_t round) noexcept { return lane_->result(base_ + round); }
  /// The number that the lane gives to round 0.
  std::uint64_t first_round() const noexcept { return base_; }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }

  const Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::uint64_t rounds_ = 0;  ///< of this collective; the same on every member
  bool takes_ = false;

 private:
  bool step();

  const std::shared_ptr<Lane> lane_;
  const std::uint64_t base_;
  std::uint64_t filled_ = 0;
  std::uint64_t processed_ = 0;
  std::uint64_t taken_ = 0;
};

/// hvd::Collective says what `in` and `out` hold for each kind.
std::unique_ptr<Work> make_work(std::shared_ptr<Lane>, const Collective&, std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::shm
