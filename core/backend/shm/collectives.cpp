#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "backend/shm/pipelined_work.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::shm {
namespace {

using segment::common_part;
using segment::round_part;

/// A round moves a part of the tensor, at most a buffer. Each member reduces its slice of the part
/// for all members. A small tensor is one part, and every member reduces all of it.
class ShmAllreduce final : public PipelinedWork {
 public:
  using PipelinedWork::PipelinedWork;

 private:
  bool prepare() override {
    sliced_ = in_.size() > channel().tuning().small_bytes;
    set_rounds(segment::rounds_of(in_.size(), step()));
    if (sliced_) offer(in_, out_);
    return sliced_;
  }

  std::optional<std::size_t> bytes_ahead() const noexcept override {
    return out_.size() * (members() - 1);
  }
  void prepare_ahead() noexcept override { sliced_ = false; }

  std::size_t step() noexcept { return channel().tuning().buffer_bytes; }
  Range part(std::uint64_t round) noexcept {
    return segment::round_part(in_.size(), round, step());
  }
  /// The slice of `bytes` bytes that this member reduces.
  Range own_slice(std::size_t bytes) noexcept {
    return sliced_ ? segment::slice_of(bytes, rank(), members()) : Range{0, bytes};
  }

  // This member reads its own slice from its tensor and writes the result there, so fill() and
  // copy_out() copy only the other slices.
  void fill(std::uint64_t round) override {
    const Range all = part(round);
    const Range own = sliced_ ? own_slice(all.size()) : Range{};
    const auto write_part = [this](auto... arguments) { write(arguments...); };
    segment::copy_around(write_part, input_buffer(round, rank()), in_.data() + all.begin,
                         all.size(), own);
  }

  bool reduce(std::uint64_t round) override {
    const Range all = part(round);
    const Range own = own_slice(all.size());
    if (own.empty()) return true;
    for (std::size_t member = 0; member < members(); ++member)
      channel().sources[member] = input_buffer(round, member) + own.begin;
    channel().sources[rank()] = in_.data() + all.begin + own.begin;
    std::byte* const to[] = {out_.data() + all.begin + own.begin, result_buffer(round) + own.begin};
    reduce_to(std::span(to).first(sliced_ ? 2 : 1), own.size());
    return true;
  }

  void copy_out(std::uint64_t round) override {
    const Range all = part(round);
    const auto copy_part = [this](auto... arguments) { copy(arguments...); };
    segment::copy_around(copy_part, out_.data() + all.begin, result_buffer(round), all.size(),
                         own_slice(all.size()));
  }

  std::size_t bytes_in_place() override { return own_slice(in_.size()).size(); }

  void reduce_in_place(Range share) override {
    const std::size_t begin = own_slice(in_.size()).begin + share.begin;
    for (std::size_t member = 0; member < members(); ++member) {
      channel().sources[member] = input_of(member) + begin;
      channel().destinations[member] = output_of(member) + begin;
    }
    std::swap(channel().destinations[0], channel().destinations[rank()]);
    reduce_to(channel().destinations, share.size());
  }

  bool sliced_ = false;
};

/// Only the root fills its buffer.
class ShmBroadcast final : public PipelinedWork {
 public:
  using PipelinedWork::PipelinedWork;

 private:
  bool prepare() override {
    set_rounds(segment::rounds_of(out_.size(), step()));
    if (out_.size() > channel().tuning().small_bytes)
      offer(at_root() ? in_ : std::span<const std::byte>());
    return false;
  }
  std::size_t step() noexcept { return channel().tuning().buffer_bytes; }
  std::optional<std::size_t> bytes_ahead() const noexcept override { return out_.size(); }
  std::size_t root() const noexcept { return static_cast<std::size_t>(collective_.root); }
  bool at_root() const noexcept { return rank() == root(); }

  void fill(std::uint64_t round) override {
    const Range moved = round_part(out_.size(), round, step());
    if (at_root()) write(input_buffer(round, root()), in_.data() + moved.begin, moved.size());
  }
  bool reduce(std::uint64_t round) override {
    const Range moved = round_part(out_.size(), round, step());
    copy(out_.data() + moved.begin,
         at_root() ? in_.data() + moved.begin : input_buffer(round, root()), moved.size());
    return true;
  }
  std::size_t bytes_in_place() override {
    return at_root() && in_.data() == out_.data() ? 0 : out_.size();
  }
  void reduce_in_place(Range part) override {
    copy(out_.data() + part.begin, input_of(root()) + part.begin, part.size());
  }
};

class ShmAllgather final : public PipelinedWork {
 public:
  ShmAllgather(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out)
      : PipelinedWork(std::move(channel), collective, in, out),
        blocks_(segment::blocks_of(collective.counts, element())) {}

 private:
  std::optional<std::size_t> bytes_ahead() const noexcept override { return out_.size(); }
  bool prepare() override {
    set_rounds(segment::max_rounds(blocks_, step()));
    if (out_.size() > channel().tuning().small_bytes) offer(in_);
    return false;
  }
  std::size_t step() noexcept { return channel().tuning().buffer_bytes; }

  void fill(std::uint64_t round) override {
    const Range moved = round_part(in_.size(), round, step());
    write(input_buffer(round, rank()), in_.data() + moved.begin, moved.size());
  }
  bool reduce(std::uint64_t round) override {
    for (std::size_t member = 0; member < members(); ++member) {
      if (is_in_place(member)) continue;
      const Range moved = round_part(blocks_[member], round, step());
      copy(out_.data() + moved.begin, input_buffer(round, member), moved.size());
    }
    return true;
  }
  void reduce_in_place(Range part) override {
    for (std::size_t member = 0; member < members(); ++member) {
      const Range here = common_part(blocks_[member], part);
      if (here.empty() || is_in_place(member)) continue;
      copy(out_.data() + here.begin, input_of(member) + here.begin - blocks_[member].begin,
           here.size());
    }
  }
  /// Whether the block is this member's own and already in place. Other members may be reading it.
  bool is_in_place(std::size_t member) noexcept {
    return member == rank() && in_.data() == out_.data() + blocks_[member].begin;
  }

  const std::vector<Range> blocks_;  ///< of the output, by member
};

/// Base class of collectives in which each member sends a different block to each other member. A
/// buffer has a section for each receiver. A member's block for itself is not copied to a buffer.
class ShmExchange : public PipelinedWork {
 public:
  ShmExchange(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
              std::span<const std::byte> in, std::span<std::byte> out,
              std::span<const std::int64_t> sent)
      : PipelinedWork(std::move(channel), collective, in, out),
        sent_(segment::blocks_of(sent, element())),
        step_(this->channel().tuning().buffer_bytes / (members() - 1) / kCacheLine * kCacheLine) {}

 protected:
  void fill(std::uint64_t round) override {
    for (std::size_t member = 0; member < members(); ++member) {
      if (member == rank()) continue;
      const Range moved = round_part(sent_[member], round, step_);
      write(section(round, rank(), member), in_.data() + moved.begin, moved.size());
    }
  }
  /// The section for `to` in the buffer of `from`. @pre from is not to
  std::byte* section(std::uint64_t round, std::size_t from, std::size_t to) noexcept {
    HVD_EXPECT(from != to, "no member sends itself anything");
    return input_buffer(round, from) + (to < from ? to : to - 1) * step_;
  }
  /// This member's block for itself, in the input.
  const Range& kept() const noexcept { return sent_[rank()]; }

  const std::vector<Range> sent_;  ///< of the input, by receiver
  const std::size_t step_;
};

class ShmReducescatter final : public ShmExchange {
 public:
  ShmReducescatter(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
                   std::span<const std::byte> in, std::span<std::byte> out)
      : ShmExchange(std::move(channel), collective, in, out, collective.counts) {}

 private:
  std::optional<std::size_t> bytes_ahead() const noexcept override {
    std::size_t most = 0;
    for (const Range& block : sent_) most = std::max(most, block.size());
    return most * (members() - 1);
  }
  bool prepare() override {
    set_rounds(segment::max_rounds(sent_, step_));
    if (in_.size() > channel().tuning().small_bytes) offer(in_);
    return false;
  }
  bool reduce(std::uint64_t round) override {
    const Range moved = round_part(out_.size(), round, step_);
    if (moved.empty()) return true;
    for (std::size_t member = 0; member < members(); ++member) {
      channel().sources[member] = member == rank()
                                      ? in_.data() + round_part(kept(), round, step_).begin
                                      : section(round, member, rank());
    }
    reduce_into(moved);
    return true;
  }
  void reduce_in_place(Range part) override {
    for (std::size_t member = 0; member < members(); ++member)
      channel().sources[member] = input_of(member) + kept().begin + part.begin;
    reduce_into(part);
  }
  void reduce_into(Range of_output) {
    std::byte* const to[] = {out_.data() + of_output.begin};
    reduce_to(to, of_output.size());
  }
};

/// A member has only the sizes of the blocks that it sends and receives, so each member publishes
/// the number of rounds that its own data needs, and whether the data is too large to be filled
/// ahead.
class ShmAlltoall final : public ShmExchange {
 public:
  ShmAlltoall(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
              std::span<const std::byte> in, std::span<std::byte> out)
      : ShmExchange(std::move(channel), collective, in, out, collective.send_counts),
        received_(segment::blocks_of(collective.counts, element())) {}

 private:
  bool prepare() override {
    set_rounds(1);  // reduce(0) adds the other rounds
    kept_copied_ = 0;
    ahead_ = suits_ahead_ = false;
    offer(in_);
    return false;
  }
  // The sizes are those of the last use.
  void prepare_ahead() noexcept override {
    kept_copied_ = 0;
    ahead_ = true;
  }
  // Every member has found that each of them reads at most ShmTuning::ahead_bytes.
  std::optional<std::size_t> bytes_ahead() const noexcept override {
    return suits_ahead_ ? std::optional(out_.size()) : std::nullopt;
  }

  void fill(std::uint64_t round) override {
    if (round == 0 && !ahead_) {
      const bool too_large = out_.size() > channel().tuning().ahead_bytes;
      wanted_by(rank()) = own_rounds() | (too_large ? kTooLarge : 0);
    }
    ShmExchange::fill(round);
  }
  bool reduce(std::uint64_t round) override {
    if (round == 0 && !copy_kept()) return false;
    if (round == 0 && !ahead_) {
      std::uint64_t most = 1;
      bool too_large = false;
      for (std::size_t member = 0; member < members(); ++member) {
        most = std::max(most, wanted_by(member) & ~kTooLarge);
        too_large = too_large || (wanted_by(member) & kTooLarge) != 0;
      }
      add_rounds(most - 1);
      suits_ahead_ = most == 1 && !too_large;
    }
    for (std::size_t member = 0; member < members(); ++member) {
      if (member == rank()) continue;
      const Range moved = round_part(received_[member], round, step_);
      copy(out_.data() + moved.begin, section(round, member, rank()), moved.size());
    }
    return true;
  }
  /// @return whether the whole block has been copied
  bool copy_kept() {
    const std::size_t left = kept().size() - kept_copied_;
    const std::size_t bytes = ahead_ ? left : std::min(left, channel().tuning().call_bytes);
    copy(out_.data() + received_[rank()].begin + kept_copied_,
         in_.data() + kept().begin + kept_copied_, bytes);
    kept_copied_ += bytes;
    return kept_copied_ == kept().size();
  }

  /// The number of rounds that a member's data needs. Indexed by the parity of the first data
  /// round, not of the first round, because a member that has finished two rounds may begin the
  /// next collective while others still read.
  std::uint64_t& wanted_by(std::size_t member) noexcept {
    return channel().info(member).rounds_wanted[number(0) % 2];
  }
  std::uint64_t own_rounds() const noexcept {
    std::uint64_t most = 0;
    for (std::size_t member = 0; member < members(); ++member) {
      if (member != rank()) most = std::max(most, segment::rounds_of(sent_[member].size(), step_));
    }
    return most;
  }

  // Publishes the offset of each receiver's block in the input, because the receivers have only its
  // size.
  void fill_in_place() override {
    for (std::size_t member = 0; member < members(); ++member)
      begins(rank())[member] = sent_[member].begin;
  }
  void reduce_in_place(Range part) override {
    for (std::size_t member = 0; member < members(); ++member) {
      const Range here = common_part(received_[member], part);
      if (here.empty()) continue;
      const std::uint64_t begin = member == rank() ? kept().begin : begins(member)[rank()];
      copy(out_.data() + here.begin,
           input_of(member) + begin + here.begin - received_[member].begin, here.size());
    }
  }
  std::uint64_t* begins(std::size_t member) noexcept {
    return reinterpret_cast<std::uint64_t*>(input_buffer(0, member));
  }

  static constexpr std::uint64_t kTooLarge = std::uint64_t{1} << 63;

  const std::vector<Range> received_;  ///< of the output, by sender
  std::size_t kept_copied_ = 0;        ///< bytes of kept() copied so far
  bool ahead_ = false;                 ///< this use was filled ahead
  bool suits_ahead_ = false;           ///< the next use may be filled ahead; equal on all members
};

}  // namespace

std::unique_ptr<Work> make_work(std::shared_ptr<ShmChannelState> channel,
                                const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kAllreduce:
      return std::make_unique<ShmAllreduce>(std::move(channel), collective, in, out);
    case OpKind::kBroadcast:
      return std::make_unique<ShmBroadcast>(std::move(channel), collective, in, out);
    case OpKind::kAllgather:
      return std::make_unique<ShmAllgather>(std::move(channel), collective, in, out);
    case OpKind::kReducescatter:
      return std::make_unique<ShmReducescatter>(std::move(channel), collective, in, out);
    case OpKind::kAlltoall:
      return std::make_unique<ShmAlltoall>(std::move(channel), collective, in, out);
    default:
      throw Error(text("shm: this backend has no ", to_string(collective.kind)));
  }
}

}  // namespace hvd::shm
