#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/cache_line.h"

/// Parts of tensors, in bytes. A collective consists of rounds. A round moves one part of a tensor,
/// and the members divide the work on that part into slices.
namespace hvd::segment {

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t size() const noexcept { return end - begin; }
  bool empty() const noexcept { return begin == end; }
};

/// The intersection of two ranges. The position of an empty one is unspecified.
inline Range common_part(Range one, Range other) noexcept {
  const std::size_t begin = std::max(one.begin, other.begin);
  return {begin, std::max(begin, std::min(one.end, other.end))};
}

/// The part of a range that a round moves, at most `step` bytes. Empty after the last round.
inline Range round_part(Range all, std::uint64_t round, std::size_t step) noexcept {
  const std::size_t begin = all.begin + std::min<std::size_t>(all.size(), round * step);
  return {begin, begin + std::min(step, all.end - begin)};
}
inline Range round_part(std::size_t bytes, std::uint64_t round, std::size_t step) noexcept {
  return round_part(Range{0, bytes}, round, step);
}
inline std::uint64_t rounds_of(std::size_t bytes, std::size_t step) noexcept {
  return (bytes + step - 1) / step;
}

/// The slice of `bytes` bytes that member `index` of `members` works on. Slices consist of whole
/// cache lines, except for the last one, so that no two members write to one line. They cover all
/// bytes.
inline Range slice_of(std::size_t bytes, std::size_t index, std::size_t members) noexcept {
  const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const auto edge = [&](std::size_t at) {
    return std::min(bytes, lines * at / members * kCacheLine);
  };
  return {edge(index), edge(index + 1)};
}

/// Returns adjacent blocks, in bytes: block i has counts[i] elements of `element` bytes.
inline std::vector<Range> blocks_of(std::span<const std::int64_t> counts, std::size_t element) {
  std::vector<Range> blocks;
  blocks.reserve(counts.size());
  std::size_t begin = 0;
  for (const std::int64_t count : counts) {
    blocks.push_back({begin, begin + static_cast<std::size_t>(count) * element});
    begin = blocks.back().end;
  }
  return blocks;
}
/// The number of rounds that the largest block needs.
inline std::uint64_t max_rounds(std::span<const Range> blocks, std::size_t step) noexcept {
  std::uint64_t most = 0;
  for (const Range& block : blocks) most = std::max(most, rounds_of(block.size(), step));
  return most;
}

/// `to` may be `from`.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}
/// Calls copy(to, from, bytes) for all of `bytes` bytes but `except`, the slice that this member
/// reduces itself.
template <class Copy>
void copy_around(const Copy& copy, std::byte* to, const std::byte* from, std::size_t bytes,
                 Range except) {
  copy(to, from, except.begin);
  copy(to + except.end, from + except.end, bytes - except.end);
}

}  // namespace hvd::segment
