#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "backend/segment/pipeline.h"
#include "backend/segment/ranges.h"
#include "backend/shm/shm_channel_context.h"
#include "base/expect.h"

namespace hvd::shm {

/// A collective in rounds of at most a slot (a bounce buffer) per member: see run() for the phases.
///
/// Before the first round is reduced every member says where its tensors lie. If all of them lie in
/// arenas that all can reach, the first round is the last: reduce() is replaced by
/// reduce_in_place(), and nothing is copied into slots. If only some do, those have not filled
/// their slots, and the rounds begin anew behind the first. Everybody sees the same places and so
/// decides the same.
///
/// A call moves a bounded number of bytes (ShmTuning::call_bytes), and a phase that is not through
/// goes on in the next one.
class PipelinedWork : public Work {
 public:
  PipelinedWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out);
  bool progress() final;
  bool moved() const noexcept final { return moved_; }
  std::optional<Headway> headway() const noexcept final { return Headway{moves_}; }
  bool repeats() const noexcept final { return true; }
  bool again(std::span<const std::byte> in, std::span<std::byte> out) final;

 protected:
  using Range = segment::Range;

  /// Says how the collective goes: set_rounds(), and offer() where all members may work on the
  /// tensors in their place. The same on every member, but for where they lie.
  /// @return whether there is something to take: what a member reduces, others need too
  virtual bool prepare() = 0;
  /// Copies this member's input of the round into its slot.
  virtual void fill(std::uint64_t round) = 0;
  /// Reduces or copies what all have put into their slots. False: there is more to do, in a later
  /// call.
  virtual bool reduce(std::uint64_t round) = 0;
  /// Copies the common result out.
  virtual void take(std::uint64_t /*round*/) {}
  /// Instead of fill(0), by a member that counts on work in place: what the others need besides the
  /// places.
  virtual void fill_in_place() {}
  /// Bytes of the tensor that reduce_in_place() processes.
  virtual std::size_t bytes_in_place() { return out_.size(); }
  /// From and to the members' arenas, a part of what bytes_in_place() counts.
  virtual void reduce_in_place(Range /*part*/) {}

  // All bytes are moved by these three, which count them.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    segment::copy_bytes(to, from, bytes);
    worked_ += bytes;
  }
  /// All but `except`.
  void copy_around(std::byte* to, const std::byte* from, std::size_t bytes, Range except) noexcept {
    segment::copy_around(to, from, bytes, except);
    worked_ += bytes - except.size();
  }
  /// From context().sources.
  void reduce_to(std::span<std::byte* const> destinations, std::size_t bytes);
  /// This call has moved as much as one may.
  bool enough() const noexcept { return worked_ >= context_->tuning().call_bytes; }

  ChannelContext& context() noexcept { return *context_; }
  std::size_t members() const noexcept { return context_->size(); }
  std::size_t rank() const noexcept { return context_->rank(); }
  std::byte* slot(std::uint64_t round, std::size_t member) noexcept {
    return context_->segment().input(number(round), member);
  }
  std::byte* result(std::uint64_t round) noexcept {
    return context_->segment().result(number(round));
  }
  /// The number that the segment gives to a round with data.
  std::uint64_t number(std::uint64_t round) const noexcept {
    return pipeline_.number(skipped_ + round);
  }
  void set_rounds(std::uint64_t rounds) noexcept { rounds_ = rounds; }
  /// The others find this member's tensors here, if they may be worked on where they lie. Empty:
  /// no other member looks at it.
  void offer(std::span<const std::byte> in, std::span<const std::byte> out = {}) noexcept;
  /// To be called from round 0: it has turned out that there are more.
  void add_rounds(std::uint64_t more) noexcept { pipeline_.set_rounds(pipeline_.rounds() + more); }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }
  std::int64_t elements(std::size_t bytes) const noexcept {
    return static_cast<std::int64_t>(bytes / element());
  }
  /// A member's tensors. @pre in reduce_in_place(), as below
  const std::byte* input_of(std::size_t member) noexcept {
    HVD_EXPECT(in_place_, "all members work in place");
    return member == rank() ? in_.data() : context_->in_arena(member, input_at(member));
  }
  std::byte* output_of(std::size_t member) noexcept {
    HVD_EXPECT(in_place_, "all members work in place");
    return member == rank() ? out_.data() : context_->in_arena(member, output_at(member));
  }

  const Collective collective_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;

 private:
  void start();
  bool run(segment::Phase phase, std::uint64_t round);
  void fill_or_offer(std::uint64_t round);
  bool go_on_in_place();
  void decide_on_places();
  std::int64_t& input_at(std::size_t member) noexcept {
    return context_->notes(member).input_at[pipeline_.number(0) % 2];
  }
  std::int64_t& output_at(std::size_t member) noexcept {
    return context_->notes(member).output_at[pipeline_.number(0) % 2];
  }
  std::int64_t offset_of(std::span<const std::byte> tensor) const noexcept;
  /// It counts on work in place and has not filled its slot.
  bool offered_by(std::size_t member) noexcept;

  const std::shared_ptr<ChannelContext> context_;
  segment::Pipeline pipeline_;
  std::uint64_t rounds_ = 0;  ///< with data
  bool offers_ = false;       ///< work in place, on tensors that begin at:
  std::int64_t offered_input_ = 0;
  std::int64_t offered_output_ = 0;
  bool started_ = false;
  bool in_place_ = false;
  std::size_t in_place_done_ = 0;  ///< bytes
  std::size_t worked_ = 0;         ///< bytes read or copied by the last progress()
  bool moved_ = false;             ///< by the last progress()
  std::uint64_t moves_ = 0;        ///< calls of progress() that moved something
  std::uint64_t skipped_ = 0;      ///< rounds without data
};

/// hvd::Collective says what `in` and `out` hold for each kind.
std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext>, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);

std::unique_ptr<Work> make_allreduce(std::shared_ptr<ChannelContext>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_broadcast(std::shared_ptr<ChannelContext>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_allgather(std::shared_ptr<ChannelContext>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_reducescatter(std::shared_ptr<ChannelContext>, const Collective&,
                                         std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_alltoall(std::shared_ptr<ChannelContext>, const Collective&,
                                    std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::shm
