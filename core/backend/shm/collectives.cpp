#include <algorithm>
#include <utility>
#include <vector>

#include "backend/shm/pipelined_work.h"

namespace hvd::shm {
namespace {

using segment::chunk_of;
using segment::common_part;

/// Kinds in which each member has something of its own for each other: a slot is shared out among
/// the receivers. What a member has for itself stays where it is.
class ExchangeWork : public PipelinedWork {
 public:
  ExchangeWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out,
               std::span<const std::int64_t> sent)
      : PipelinedWork(std::move(context), collective, in, out),
        sent_(segment::blocks_of(sent, element())),
        step_(this->context().tuning().slot_bytes / (members() - 1) / kCacheLine * kCacheLine) {}

 protected:
  void fill(std::uint64_t round) override {
    for (std::size_t member = 0; member < members(); ++member) {
      if (member == rank()) continue;
      const Range chunk = chunk_of(sent_[member], round, step_);
      copy(part(round, rank(), member), in_.data() + chunk.begin, chunk.size());
    }
  }
  /// Where in a member's slot another one finds its own. @pre from is not to
  std::byte* part(std::uint64_t round, std::size_t from, std::size_t to) noexcept {
    HVD_EXPECT(from != to, "no member sends itself anything");
    return slot(round, from) + (to < from ? to : to - 1) * step_;
  }
  /// What this member has for itself.
  const Range& kept() const noexcept { return sent_[rank()]; }

  const std::vector<Range> sent_;  ///< of the input, by receiver
  const std::size_t step_;
};

class ReducescatterWork final : public ExchangeWork {
 public:
  ReducescatterWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(context), collective, in, out, collective.counts) {}

 private:
  bool prepare() override {
    set_rounds(segment::most_rounds(sent_, step_));
    if (in_.size() > context().tuning().small_bytes) offer(in_);
    return false;
  }
  bool reduce(std::uint64_t round) override {
    const Range chunk = chunk_of(out_.size(), round, step_);
    if (chunk.empty()) return true;
    for (std::size_t member = 0; member < members(); ++member) {
      context().sources[member] = member == rank()
                                      ? in_.data() + chunk_of(kept(), round, step_).begin
                                      : part(round, member, rank());
    }
    reduce_into(chunk);
    return true;
  }
  void reduce_in_place(Range part) override {
    for (std::size_t member = 0; member < members(); ++member)
      context().sources[member] = input_of(member) + kept().begin + part.begin;
    reduce_into(part);
  }
  void reduce_into(Range of_output) {
    std::byte* const to[] = {out_.data() + of_output.begin};
    reduce_to(to, of_output.size());
  }
};

/// A member knows what it sends and gets, not what goes on between others: so each says how many
/// rounds its own data takes.
class AlltoallWork final : public ExchangeWork {
 public:
  AlltoallWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(context), collective, in, out, collective.send_counts),
        received_(segment::blocks_of(collective.counts, element())) {}

 private:
  bool prepare() override {
    set_rounds(1);  // until the others have said how many
    kept_copied_ = 0;
    offer(in_);
    return false;
  }

  void fill(std::uint64_t round) override {
    if (round == 0) wanted_by(rank()) = own_rounds();
    ExchangeWork::fill(round);
  }
  bool reduce(std::uint64_t round) override {
    if (round == 0 && !copy_kept()) return false;
    if (round == 0) {
      std::uint64_t most = 1;
      for (std::size_t member = 0; member < members(); ++member)
        most = std::max(most, wanted_by(member));
      add_rounds(most - 1);
    }
    for (std::size_t member = 0; member < members(); ++member) {
      if (member == rank()) continue;
      const Range chunk = chunk_of(received_[member], round, step_);
      copy(out_.data() + chunk.begin, part(round, member, rank()), chunk.size());
    }
    return true;
  }
  /// @return whether all of it has been copied
  bool copy_kept() {
    const std::size_t bytes = std::min(kept().size() - kept_copied_, context().tuning().call_bytes);
    copy(out_.data() + received_[rank()].begin + kept_copied_,
         in_.data() + kept().begin + kept_copied_, bytes);
    kept_copied_ += bytes;
    return kept_copied_ == kept().size();
  }

  /// By the parity of the first round with data and not of the first: who has all of two rounds
  /// begins the next collective while others still look.
  std::uint64_t& wanted_by(std::size_t member) noexcept {
    return context().notes(member).rounds_wanted[number(0) % 2];
  }
  std::uint64_t own_rounds() const noexcept {
    std::uint64_t most = 0;
    for (std::size_t member = 0; member < members(); ++member) {
      if (member != rank()) most = std::max(most, segment::rounds_of(sent_[member].size(), step_));
    }
    return most;
  }

  // Where in the input what each receives begins: the receivers know how much it is only.
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
    return reinterpret_cast<std::uint64_t*>(slot(0, member));
  }

  const std::vector<Range> received_;  ///< of the output, by sender
  std::size_t kept_copied_ = 0;        ///< of kept(), in the rounds' slots
};

}  // namespace

std::unique_ptr<Work> make_reducescatter(std::shared_ptr<ChannelContext> context,
                                         const Collective& collective,
                                         std::span<const std::byte> in, std::span<std::byte> out) {
  return std::make_unique<ReducescatterWork>(std::move(context), collective, in, out);
}

std::unique_ptr<Work> make_alltoall(std::shared_ptr<ChannelContext> context,
                                    const Collective& collective, std::span<const std::byte> in,
                                    std::span<std::byte> out) {
  return std::make_unique<AlltoallWork>(std::move(context), collective, in, out);
}

}  // namespace hvd::shm
