#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "backend/segment/pipeline.h"
#include "backend/segment/ranges.h"
#include "backend/shm/shm_channel_state.h"
#include "base/expect.h"

namespace hvd::shm {

/// A collective in rounds of at most one buffer per member. See run() for the phases.
///
/// Before the first round is reduced, every member publishes the offsets of its tensors that others
/// access. If all these are in arenas that all members have mapped, the first round is the last:
/// reduce_in_place() runs instead of reduce(), and no buffer is used. If only some members' tensors
/// are in such arenas, these members have not filled their buffers, and the data rounds begin after
/// the first round. All members read the same offsets and therefore make the same decision.
///
/// A call of progress() moves a bounded number of bytes (ShmTuning::call_bytes). The next call
/// continues an unfinished phase.
class PipelinedWork : public Work {
 public:
  PipelinedWork(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out);
  bool progress() final;
  bool moved() const noexcept final { return moved_; }
  std::optional<ProgressCount> progress_count() const noexcept final {
    return ProgressCount{moves_};
  }
  bool repeats() const noexcept final { return true; }
  bool again(std::span<const std::byte> in, std::span<std::byte> out) final;
  bool may_fill_ahead() const noexcept final;
  bool fills_ahead() const noexcept final {
    return may_fill_ahead() && channel_->segment().last_rounds == 1;
  }
  void fill_ahead(std::span<const std::byte> in) final;
  void run_filled(std::span<std::byte> out) final;

 protected:
  using Range = segment::Range;

  /// Must call set_rounds(), and offer() if the members may work on the tensors in place. It must
  /// make the same calls on every member.
  /// @return whether the rounds have a copy_out() phase, because members reduce for each other
  virtual bool prepare() = 0;
  /// If fill() and reduce() of a single round may run as fill_ahead() and run_filled(): the maximum
  /// number of bytes that any member then reads.
  virtual std::optional<std::size_t> bytes_ahead() const noexcept { return std::nullopt; }
  /// Makes each member reduce everything for itself, from now until prepare() is called again.
  virtual void prepare_ahead() noexcept {}
  /// Copies this member's input of the round into its buffer.
  virtual void fill(std::uint64_t round) = 0;
  /// Reduces or copies the members' buffers. False: a later call continues.
  virtual bool reduce(std::uint64_t round) = 0;
  /// Copies the result buffer to the output.
  virtual void copy_out(std::uint64_t /*round*/) {}
  /// Runs instead of fill(0) on a member that offers its tensors. Publishes the data that other
  /// members need in addition to the offsets.
  virtual void fill_in_place() {}
  /// Bytes of the tensor that reduce_in_place() processes.
  virtual std::size_t bytes_in_place() { return out_.size(); }
  /// Processes a part of the bytes_in_place() bytes, from and to the members' arenas.
  virtual void reduce_in_place(Range /*part*/) {}

  // Subclasses move data only with the next three functions, which count the bytes.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    segment::copy_bytes(to, from, bytes);
    worked_ += bytes;
  }
  /// Copies to a buffer that another member reads next.
  void write(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    channel_->segment().write(to, from, bytes);
    worked_ += bytes;
  }
  /// Reduces channel().sources to all `destinations`. Other members next read all of these except
  /// the first. May change channel().sources.
  void reduce_to(std::span<std::byte* const> destinations, std::size_t bytes);
  /// Whether this call of progress() has moved as many bytes as it may.
  bool enough() const noexcept { return worked_ >= channel_->tuning().call_bytes; }

  ShmChannelState& channel() noexcept { return *channel_; }
  std::size_t members() const noexcept { return channel_->size(); }
  std::size_t rank() const noexcept { return channel_->rank(); }
  std::byte* input_buffer(std::uint64_t round, std::size_t member) noexcept {
    return channel_->segment().input(number(round), member);
  }
  std::byte* result_buffer(std::uint64_t round) noexcept {
    return channel_->segment().result(number(round));
  }
  /// The segment's number of a data round.
  std::uint64_t number(std::uint64_t round) const noexcept {
    return pipeline_.number(skipped_ + round);
  }
  void set_rounds(std::uint64_t rounds) noexcept { rounds_ = rounds; }
  /// Offers this member's tensors for work in place. Empty: the other members do not access that
  /// tensor. A member without tensors works in place if all others do; if not, it has filled its
  /// buffer, like the members that refuse.
  void offer(std::span<const std::byte> in, std::span<const std::byte> out = {}) noexcept;
  /// Adds data rounds. May be called only in round 0.
  void add_rounds(std::uint64_t more) noexcept { pipeline_.set_rounds(pipeline_.rounds() + more); }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }
  std::int64_t elements(std::size_t bytes) const noexcept {
    return static_cast<std::int64_t>(bytes / element());
  }
  /// The tensors of a member. @pre called from reduce_in_place(); the same for output_of()
  const std::byte* input_of(std::size_t member) noexcept {
    HVD_EXPECT(in_place_, "all members work in place");
    return member == rank() ? in_.data() : channel_->in_arena(member, input_at(member));
  }
  std::byte* output_of(std::size_t member) noexcept {
    HVD_EXPECT(in_place_, "all members work in place");
    return member == rank() ? out_.data() : channel_->in_arena(member, output_at(member));
  }

  const Collective collective_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;

 private:
  /// Published as the offset of the input by a member whose tensors no other member accesses.
  static constexpr std::int64_t kNoTensors = -2;

  void start();
  bool run(segment::RoundPhase phase, std::uint64_t round);
  void fill_or_offer(std::uint64_t round);
  bool continue_in_place();
  void choose_place();
  std::int64_t& input_at(std::size_t member) noexcept {
    return channel_->info(member).input_at[pipeline_.number(0) % 2];
  }
  std::int64_t& output_at(std::size_t member) noexcept {
    return channel_->info(member).output_at[pipeline_.number(0) % 2];
  }
  std::int64_t offset_of(std::span<const std::byte> tensor) const noexcept;
  /// Whether a member works in place, and whether it has filled its buffer. kTensors: it has not.
  enum class Offer : std::uint8_t { kRefuses, kNoTensors, kTensors };
  Offer offer_of(std::size_t member) noexcept;

  const std::shared_ptr<ShmChannelState> channel_;
  segment::Pipeline pipeline_;
  std::uint64_t rounds_ = 0;        ///< data rounds
  bool offers_ = false;             ///< prepare() has called offer(), with tensors at these offsets
  std::int64_t offered_input_ = 0;  ///< or kNoTensors
  std::int64_t offered_output_ = 0;
  bool started_ = false;
  bool in_place_ = false;
  std::size_t in_place_done_ = 0;  ///< bytes processed by reduce_in_place()
  std::size_t worked_ = 0;         ///< bytes read or copied by the last progress()
  bool moved_ = false;             ///< by the last progress()
  std::uint64_t moves_ = 0;        ///< calls of progress() that moved something
  std::uint64_t skipped_ = 0;      ///< rounds without data at the beginning
};

/// See hvd::Collective for the contents of `in` and `out`.
std::unique_ptr<Work> make_work(std::shared_ptr<ShmChannelState>, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::shm
