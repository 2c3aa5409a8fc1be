#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/cache_line.h"

/// How tensors are cut, in bytes. A collective goes in *rounds*; a round moves one *chunk* of a
/// tensor; the members share the work of a chunk by *slices* of it.
namespace hvd::segment {

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t size() const noexcept { return end - begin; }
  bool empty() const noexcept { return begin == end; }
};

/// The intersection of two ranges. An empty one has an arbitrary position.
inline Range common_part(Range one, Range other) noexcept {
  const std::size_t begin = std::max(one.begin, other.begin);
  return {begin, std::max(begin, std::min(one.end, other.end))};
}

/// What round `round` moves of a range in chunks of `step`; empty behind the last.
inline Range chunk_of(Range all, std::uint64_t round, std::size_t step) noexcept {
  const std::size_t begin = all.begin + std::min<std::size_t>(all.size(), round * step);
  return {begin, begin + std::min(step, all.end - begin)};
}
inline Range chunk_of(std::size_t bytes, std::uint64_t round, std::size_t step) noexcept {
  return chunk_of(Range{0, bytes}, round, step);
}
inline std::uint64_t rounds_of(std::size_t bytes, std::size_t step) noexcept {
  return (bytes + step - 1) / step;
}

/// What member `index` of `members` works on of `bytes` bytes: whole cache lines, but for the last,
/// so that no two write to one. All slices together are all bytes.
inline Range slice_of(std::size_t bytes, std::size_t index, std::size_t members) noexcept {
  const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const auto edge = [&](std::size_t at) {
    return std::min(bytes, lines * at / members * kCacheLine);
  };
  return {edge(index), edge(index + 1)};
}

/// The blocks of these many elements, one behind the other.
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
/// Of the largest of them.
inline std::uint64_t most_rounds(std::span<const Range> blocks, std::size_t step) noexcept {
  std::uint64_t most = 0;
  for (const Range& block : blocks) most = std::max(most, rounds_of(block.size(), step));
  return most;
}

/// `to` may be `from`.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}
/// All but `except` of `bytes` bytes: what others reduce, not what this member reduces itself.
inline void copy_around(std::byte* to, const std::byte* from, std::size_t bytes,
                        Range except) noexcept {
  copy_bytes(to, from, except.begin);
  copy_bytes(to + except.end, from + except.end, bytes - except.end);
}

}  // namespace hvd::segment
