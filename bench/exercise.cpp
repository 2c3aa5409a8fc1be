#include "bench/exercise.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "hvd/memory.h"

namespace hvd::bench {
namespace {

constexpr std::size_t kPeriod = 8191;
constexpr std::size_t kShiftPerRank = 1009;
constexpr std::size_t kPage = 4096;
constexpr int kRoot = 0;

float element(int rank, std::size_t index) {
  const auto shift = static_cast<std::size_t>(rank) * kShiftPerRank;
  return static_cast<float>((index + shift) % kPeriod + static_cast<std::size_t>(rank));
}

bool divides(OpKind kind) { return kind != OpKind::kAllreduce && kind != OpKind::kBroadcast; }

}  // namespace

Buffer::Buffer(std::size_t floats, Memory memory) : size_(floats) {
  const std::size_t bytes = std::max((floats * sizeof(float) + kPage - 1) / kPage * kPage, kPage);
  if (memory == Memory::kShared) {
    const std::shared_ptr<std::byte> shared = allocate_shared(bytes);
    data_ = {shared, reinterpret_cast<float*>(shared.get())};
  } else {
    data_.reset(static_cast<float*>(std::aligned_alloc(kPage, bytes)),
                [](float* mine) { std::free(mine); });
  }
  if (data_ == nullptr) throw std::bad_alloc();
  std::fill_n(data_.get(), floats, 1.0f);
}

std::vector<float> pattern_of(int rank) {
  std::vector<float> pattern(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) pattern[i] = element(rank, i);
  return pattern;
}

void write_pattern(std::span<const float> pattern, std::size_t first, std::span<float> out) {
  std::size_t from = first % pattern.size();
  while (!out.empty()) {
    const std::size_t count = std::min(pattern.size() - from, out.size());
    std::memcpy(out.data(), pattern.data() + from, count * sizeof(float));
    out = out.subspan(count);
    from = 0;
  }
}

std::size_t Exercise::floats_needed(std::size_t bytes, int ranks) {
  return (bytes + sizeof(float) - 1) / sizeof(float) + static_cast<std::size_t>(ranks);
}

Exercise::Exercise(OpKind kind, std::size_t bytes, int rank, int ranks, const Arena& arena)
    : kind_(kind), rank_(rank), ranks_(ranks) {
  const std::size_t owners = divides(kind) ? static_cast<std::size_t>(ranks) : 1;
  block_ =
      std::max<std::size_t>(1, (bytes + sizeof(float) * owners - 1) / (sizeof(float) * owners));
  count_ = block_ * owners;
  input_ = {arena.input.data(), kind == OpKind::kAllgather ? block_ : count_};
  output_ = {divides(kind) ? arena.output.data() : arena.input.data(),
             kind == OpKind::kReducescatter ? block_ : count_};
  spare_ = {arena.spare.data(), count_};
  own_pattern_ = pattern_of(rank);
  summed_pattern_.resize(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    for (int other = 0; other < ranks; ++other) summed_pattern_[i] += element(other, i);
  }
}

void Exercise::fill() const { write_pattern(own_pattern_, 0, input_); }

void Exercise::spoil() const {
  if (output_.data() != input_.data()) std::fill(output_.begin(), output_.end(), -1.0f);
}

float Exercise::expected(std::size_t index) const {
  const std::size_t own_offset = static_cast<std::size_t>(rank_) * block_;
  switch (kind_) {
    case OpKind::kAllreduce:
      return summed_pattern_[index % kPeriod];
    case OpKind::kReducescatter:
      return summed_pattern_[(own_offset + index) % kPeriod];
    case OpKind::kBroadcast:
      return element(kRoot, index);
    case OpKind::kAllgather:
      return element(static_cast<int>(index / block_), index % block_);
    default:
      return element(static_cast<int>(index / block_), own_offset + index % block_);
  }
}

std::optional<std::string> Exercise::fault() const {
  for (std::size_t i = 0; i < output_.size(); ++i) {
    if (output_[i] == expected(i)) continue;
    return std::string(to_string(kind_)) + " of " + std::to_string(bytes()) + " bytes on rank " +
           std::to_string(rank_) + ": element " + std::to_string(i) + " is " +
           std::to_string(output_[i]) + ", expected " + std::to_string(expected(i));
  }
  return std::nullopt;
}

}  // namespace hvd::bench
