#include <utility>
#include <vector>

#include "backend/shm/pipelined_work.h"

namespace hvd::shm {
namespace {

using segment::chunk_of;
using segment::common_part;

/// Only the root fills its slot.
class BroadcastWork final : public PipelinedWork {
 public:
  using PipelinedWork::PipelinedWork;

 private:
  bool prepare() override {
    set_rounds(segment::rounds_of(out_.size(), step()));
    if (out_.size() > context().tuning().small_bytes)
      offer(at_root() ? in_ : std::span<const std::byte>());
    return false;
  }
  std::size_t step() noexcept { return context().tuning().slot_bytes; }
  std::size_t root() const noexcept { return static_cast<std::size_t>(collective_.root); }
  bool at_root() const noexcept { return rank() == root(); }

  void fill(std::uint64_t round) override {
    const Range chunk = chunk_of(out_.size(), round, step());
    if (at_root()) copy(slot(round, root()), in_.data() + chunk.begin, chunk.size());
  }
  bool reduce(std::uint64_t round) override {
    const Range chunk = chunk_of(out_.size(), round, step());
    copy(out_.data() + chunk.begin, at_root() ? in_.data() + chunk.begin : slot(round, root()),
         chunk.size());
    return true;
  }
  std::size_t bytes_in_place() override {
    return at_root() && in_.data() == out_.data() ? 0 : out_.size();
  }
  void reduce_in_place(Range part) override {
    copy(out_.data() + part.begin, input_of(root()) + part.begin, part.size());
  }
};

class AllgatherWork final : public PipelinedWork {
 public:
  AllgatherWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : PipelinedWork(std::move(context), collective, in, out),
        blocks_(segment::blocks_of(collective.counts, element())) {}

 private:
  bool prepare() override {
    set_rounds(segment::most_rounds(blocks_, step()));
    if (out_.size() > context().tuning().small_bytes) offer(in_);
    return false;
  }
  std::size_t step() noexcept { return context().tuning().slot_bytes; }

  void fill(std::uint64_t round) override {
    const Range chunk = chunk_of(in_.size(), round, step());
    copy(slot(round, rank()), in_.data() + chunk.begin, chunk.size());
  }
  bool reduce(std::uint64_t round) override {
    for (std::size_t member = 0; member < members(); ++member) {
      if (lies_there(member)) continue;
      const Range chunk = chunk_of(blocks_[member], round, step());
      copy(out_.data() + chunk.begin, slot(round, member), chunk.size());
    }
    return true;
  }
  void reduce_in_place(Range part) override {
    for (std::size_t member = 0; member < members(); ++member) {
      const Range here = common_part(blocks_[member], part);
      if (here.empty() || lies_there(member)) continue;
      copy(out_.data() + here.begin, input_of(member) + here.begin - blocks_[member].begin,
           here.size());
    }
  }
  /// The others may be reading it.
  bool lies_there(std::size_t member) noexcept {
    return member == rank() && in_.data() == out_.data() + blocks_[member].begin;
  }

  const std::vector<Range> blocks_;  ///< of the output, by member
};

}  // namespace

std::unique_ptr<Work> make_broadcast(std::shared_ptr<ChannelContext> context,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out) {
  return std::make_unique<BroadcastWork>(std::move(context), collective, in, out);
}

std::unique_ptr<Work> make_allgather(std::shared_ptr<ChannelContext> context,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out) {
  return std::make_unique<AllgatherWork>(std::move(context), collective, in, out);
}

}  // namespace hvd::shm
