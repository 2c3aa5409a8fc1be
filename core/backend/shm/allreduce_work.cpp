#include <algorithm>
#include <utility>

#include "backend/shm/pipelined_work.h"

namespace hvd::shm {
namespace {

/// A round moves a chunk of at most a slot, of which each member reduces its slice for all; a small
/// tensor is one chunk, and every member reduces all of it by itself.
class AllreduceWork final : public PipelinedWork {
 public:
  using PipelinedWork::PipelinedWork;

 private:
  bool prepare() override {
    sliced_ = in_.size() > context().tuning().small_bytes;
    set_rounds(segment::rounds_of(in_.size(), step()));
    if (sliced_) offer(in_, out_);
    return sliced_;
  }

  std::size_t step() noexcept { return context().tuning().slot_bytes; }
  Range chunk(std::uint64_t round) noexcept { return segment::chunk_of(in_.size(), round, step()); }
  /// Of so many bytes: what this member reduces.
  Range own_slice(std::size_t bytes) noexcept {
    return sliced_ ? segment::slice_of(bytes, rank(), members()) : Range{0, bytes};
  }

  // What this member reduces for all it reads from where it is, and needs no slot; only the rest is
  // copied in and out.
  void fill(std::uint64_t round) override {
    const Range all = chunk(round);
    const Range own = sliced_ ? own_slice(all.size()) : Range{};
    copy_around(slot(round, rank()), in_.data() + all.begin, all.size(), own);
  }

  bool reduce(std::uint64_t round) override {
    const Range all = chunk(round);
    const Range own = own_slice(all.size());
    if (own.empty()) return true;
    for (std::size_t member = 0; member < members(); ++member)
      context().sources[member] = slot(round, member) + own.begin;
    context().sources[rank()] = in_.data() + all.begin + own.begin;
    std::byte* const to[] = {out_.data() + all.begin + own.begin, result(round) + own.begin};
    reduce_to(std::span(to).first(sliced_ ? 2 : 1), own.size());
    return true;
  }

  void take(std::uint64_t round) override {
    const Range all = chunk(round);
    copy_around(out_.data() + all.begin, result(round), all.size(), own_slice(all.size()));
  }

  std::size_t bytes_in_place() override { return own_slice(in_.size()).size(); }

  void reduce_in_place(Range part) override {
    const std::size_t begin = own_slice(in_.size()).begin + part.begin;
    for (std::size_t member = 0; member < members(); ++member) {
      context().sources[member] = input_of(member) + begin;
      context().destinations[member] = output_of(member) + begin;
    }
    reduce_to(context().destinations, part.size());
  }

  bool sliced_ = false;
};

}  // namespace

std::unique_ptr<Work> make_allreduce(std::shared_ptr<ChannelContext> context,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out) {
  return std::make_unique<AllreduceWork>(std::move(context), collective, in, out);
}

}  // namespace hvd::shm
