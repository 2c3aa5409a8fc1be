#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "backend/shm/shm_channel_context.h"

namespace hvd::shm {

/// A pipelined collective, in rounds of at most a slot (a bounce buffer) per member:
///
///   fill     copies this member's input of the round into its slot   once nobody needs what the
///                                                                    slot held two rounds ago
///   process  reduces or copies what all have put into their slots    once all have filled
///   take     copies the common result out (allreduce only)           once all have processed
///
/// Two buffers let a member fill one round while others still work on the one before. The numbers
/// of rounds go on from one collective to the next, so nothing is ever reset.
///
/// Before the first round is processed every member says where its tensors lie. If all of them lie
/// in arenas that all can reach, the first round is the last: process() is replaced by
/// work_in_place(), and nothing is copied into slots. If only some do, those have not filled their
/// slots, and the rounds begin anew behind the first. Everybody sees the same places and so decides
/// the same.
class PipelinedWork : public Work {
 public:
  PipelinedWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : collective_(collective),
        in_(in),
        out_(out),
        context_(std::move(context)),
        base_(context_->next_round) {}
  bool progress() final;
  bool moved() const noexcept final { return moved_; }
  bool repeats() const noexcept final { return true; }
  bool again(std::span<const std::byte> in, std::span<std::byte> out) final;

 protected:
  /// Sets the number of rounds, whether they have something to take, and offers. Called by the
  /// constructor too.
  virtual void begin() = 0;
  virtual void fill(std::uint64_t round) = 0;
  virtual void process(std::uint64_t round) = 0;
  virtual void take(std::uint64_t /*round*/) {}
  /// Instead of fill(0), by a member that counts on work in place: what the others need besides the
  /// places.
  virtual void fill_in_place() {}
  /// From and to the members' arenas.
  virtual void work_in_place() {}

  /// For offer(): of memory that other members do not look at.
  static constexpr std::int64_t kUnused = 0;
  /// To be called in the constructor, by all members or none: where the others find what they need
  /// of this member.
  void offer(ChannelContext::Place place);

  ChannelContext& context() noexcept { return *context_; }
  std::byte* slot(std::uint64_t round, int member) noexcept {
    return context_->slot(base_ + skipped_ + round, member);
  }
  std::byte* result(std::uint64_t round) noexcept {
    return context_->result(base_ + skipped_ + round);
  }
  /// The number that the context gives to round 0, behind a round without data.
  std::uint64_t first_round() const noexcept { return base_ + skipped_; }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }
  /// A member's tensors. @pre in work_in_place(), and the member's place has them
  std::byte* input_of(int member) noexcept {
    return context_->in_arena(member, place_of(member).in);
  }
  std::byte* output_of(int member) noexcept {
    return context_->in_arena(member, place_of(member).out);
  }

  const Collective collective_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;
  std::uint64_t rounds_ = 0;  ///< of this collective; the same on every member
  bool takes_ = false;

 private:
  bool step();
  void reach(std::atomic<std::uint64_t> ChannelContext::MemberState::*stage,
             std::uint64_t rounds) noexcept;
  void settle();
  const ChannelContext::Place& place_of(int member) noexcept {
    return context_->member_state(member).place[base_ % 2];
  }
  /// It counts on work in place and has not filled its slot.
  bool offered_by(int member) noexcept;

  const std::shared_ptr<ChannelContext> context_;
  std::uint64_t base_;
  ChannelContext::Place place_ = {};
  bool offers_ = false;
  bool settled_ = false;  ///< or nothing was to be settled
  bool in_place_ = false;
  bool moved_ = false;         ///< by the last progress()
  bool awaited_ = false;       ///< others may wait for what this member has just done
  std::uint64_t skipped_ = 0;  ///< rounds without data
  std::uint64_t filled_ = 0;
  std::uint64_t processed_ = 0;
  std::uint64_t taken_ = 0;
};

/// hvd::Collective says what `in` and `out` hold for each kind.
std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext>, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::shm
