#include "engine/host_staging.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <tuple>
#include <utility>

#include "backend/backend.h"
#include "base/expect.h"
#include "base/process_exit.h"
#include "kernels/kernels.h"

namespace hvd::runtime {

namespace {

constexpr std::size_t kMaxFree = 2;

}  // namespace

FusionLease& FusionLease::operator=(FusionLease&& other) noexcept {
  FusionLease moved(std::move(other));
  std::swap(pool_, moved.pool_);
  memory_.swap(moved.memory_);
  size_ = moved.size_;
  std::swap(capacity_, moved.capacity_);
  return *this;
}

FusionLease::~FusionLease() {
  if (memory_) pool_->reclaim({std::move(memory_), capacity_});
}

void FusionLease::abandon() noexcept {
  if (memory_) keep_until_exit(std::shared_ptr<const void>(std::move(memory_)));
}

// Takes the smallest free buffer that fits. If all are too small and the pool is full, the smallest
// one is freed before a new one is allocated.
FusionLease FusionBufferPool::lease(std::size_t size) {
  FusionLease lease;
  lease.pool_ = this;
  lease.size_ = size;
  const auto too_small = std::ranges::find_if(
      free_, [size](const FusionBuffer& buffer) { return buffer.second < size; });
  if (too_small != free_.begin()) {
    const auto best = std::prev(too_small);
    std::tie(lease.memory_, lease.capacity_) = std::move(*best);
    free_.erase(best);
  } else {
    if (free_.size() == kMaxFree) free_.pop_back();
    lease.capacity_ = std::max<std::size_t>(size, 64);
    lease.memory_ = allocate_shared(arena_, lease.capacity_, true);
  }
  return lease;
}

void FusionBufferPool::trim(std::size_t largest) noexcept {
  std::erase_if(free_, [largest](const FusionBuffer& buffer) { return buffer.second > largest; });
}

// Keeps the larger buffers, which are more expensive to map again.
void FusionBufferPool::reclaim(FusionBuffer buffer) noexcept {
  const auto place = std::ranges::find_if(
      free_, [&](const FusionBuffer& other) { return other.second < buffer.second; });
  free_.insert(place, std::move(buffer));
  if (free_.size() > kMaxFree) free_.pop_back();
}

const Staged& HostStaging::stage(const Batch& batch) {
  HVD_EXPECT(input_.bytes().empty() && output_.bytes().empty(),
             "the batch before has been unstaged");
  batch.allocate_outputs();
  staged_ = {batch.collective()};
  packed_ = {};
  position_ = {};
  unpacks_ = false;
  const bool absent = batch.absent_here();
  if (batch.buffered() || absent) {
    output_ = pool_.lease(batch.out_bytes());
    staged_.out = output_.bytes();
  } else {
    staged_.in = batch.input();
    staged_.out = batch.output();
    if (!batch.conversion().scales_early()) return staged_;
  }
  packed_ = staged_.out;
  if (!batch.in_place_kind()) {
    input_ = pool_.lease(batch.in_bytes());
    packed_ = input_.bytes();
  }
  staged_.in = packed_;
  if (!absent) batch.input_pieces(input_pieces_);
  return staged_;
}

bool HostStaging::pack_part(const Batch& batch) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  if (packed_.empty()) return true;
  if (batch.absent_here()) return fill_neutral(staged_.collective);
  const bool contributes = staged_.collective.kind != OpKind::kBroadcast || batch.at_root();
  return !contributes || pack_tensors(batch);
}

bool HostStaging::pack_tensors(const Batch& batch) {
  const Conversion& conversion = batch.conversion();
  const std::size_t begin = position_.in_buffer;
  if (conversion.casts()) {
    position_ = pack_narrowed(input_pieces_, packed_, {conversion.wire_dtype, conversion.before},
                              position_, kBytesPerCall);
  } else {
    position_ = pack(input_pieces_, packed_, position_, kBytesPerCall);
  }
  if (conversion.scales_early()) {
    std::byte* const scaled = packed_.data() + begin;
    const std::byte* const source = scaled;
    reduce(
        {&source, 1}, scaled,
        static_cast<std::int64_t>((position_.in_buffer - begin) / size_of(conversion.wire_dtype)),
        conversion.wire_dtype, staged_.collective.op, {conversion.before, 1.0, 1});
  }
  return position_.piece == input_pieces_.size();
}

// Only reductions need a neutral input. In other operations the root, or the ranks with rows,
// contribute, and an absent rank does not.
bool HostStaging::fill_neutral(const Collective& collective) {
  if (collective.kind != OpKind::kAllreduce && collective.kind != OpKind::kReducescatter)
    return true;
  const ReduceOp op = collective.op == ReduceOp::kAdasum ? ReduceOp::kSum : collective.op;
  const std::size_t bytes = std::min(kBytesPerCall, packed_.size() - position_.in_buffer);
  fill_identity(packed_.data() + position_.in_buffer,
                static_cast<std::int64_t>(bytes / size_of(collective.dtype)), collective.dtype, op);
  position_.in_buffer += bytes;
  return position_.in_buffer == packed_.size();
}

bool HostStaging::unpack_part(const Batch& batch) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  if (!batch.buffered() || batch.absent_here()) return true;
  if (!std::exchange(unpacks_, true)) {
    position_ = {};
    batch.output_pieces(output_pieces_);
  }
  const Conversion& conversion = batch.conversion();
  if (conversion.casts()) {
    position_ = unpack_widened(output_.bytes(), output_pieces_,
                               {conversion.wire_dtype, conversion.after}, position_, kBytesPerCall);
  } else {
    position_ = unpack(output_.bytes(), output_pieces_, position_, kBytesPerCall);
  }
  return position_.piece == output_pieces_.size();
}

EventPtr HostStaging::unstage([[maybe_unused]] const Batch& batch, EventPtr reduced) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  input_ = {};
  output_ = {};
  staged_ = {};
  return reduced;
}

void HostStaging::abandon() noexcept {
  input_.abandon();
  output_.abandon();
}

}  // namespace hvd::runtime
