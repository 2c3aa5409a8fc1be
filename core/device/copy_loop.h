#pragma once

#include <cstddef>
#include <cstdint>

#include "device/copy_plan.h"

/// The loops with which the threads of a block copy one tile. nvcc compiles them for the device.
/// The tests compile them for the host, run them thread by thread and compare the results with
/// those of a plain loop.
#ifdef __CUDACC__
#define HVD_ON_DEVICE __host__ __device__ __forceinline__
#else
#define HVD_ON_DEVICE inline
#endif

namespace hvd::device {

/// Position of a thread among those that share a tile.
struct Share {
  std::uint32_t index;
  std::uint32_t count;
};

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

/// Elements that one access reads or writes. May alias memory of any type.
template <class Element, int kElements>
struct [[gnu::may_alias]] alignas(sizeof(Element) * kElements) Group {
  Element at[kElements];
};

/// Accesses in flight per thread.
inline constexpr std::uint32_t kUnroll = 4;

template <class From, class To>
inline constexpr int kGroup =
    static_cast<int>(16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To)));

/// Returns tile `number`, in the order of the table.
HVD_ON_DEVICE Tile tile_of(const PieceTable& table, std::uint32_t number) {
  // Binary search: the wanted entry is in [below, above).
  std::uint32_t below = 0;
  for (std::uint32_t above = table.entries; above - below > 1;) {
    const std::uint32_t middle = below + (above - below) / 2;
    if (table.entry[middle].first_tile <= number) {
      below = middle;
    } else {
      above = middle;
    }
  }
  const PieceTable::Entry& entry = table.entry[below];
  const std::uint32_t first = (number - entry.first_tile) * table.tile_elements;
  const std::uint32_t left = entry.count - first;
  return {entry.tensor + std::size_t{first} * table.tensor_element,
          entry.offset + std::size_t{first} * table.buffer_element,
          left < table.tile_elements ? left : table.tile_elements};
}

/// Sets to[i] = map(from[i]) for this thread's share of `count` elements, in groups of kElements.
/// @pre both sides reach the alignment of a group after the same number of elements
/// (unchecked: it runs on the device)
template <int kElements, class From, class To, class Map>
HVD_ON_DEVICE void map_groups(To* to, const From* from, std::uint32_t count, Share share,
                              const Map& map) {
  using FromGroup = Group<From, kElements>;
  using ToGroup = Group<To, kElements>;
  const auto element =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) / sizeof(From));
  const std::uint32_t gap = (kElements - element % kElements) % kElements;
  const std::uint32_t before = gap < count ? gap : count;
  for (std::uint32_t i = share.index; i < before; i += share.count) to[i] = map(from[i]);

  const auto* const from_groups = reinterpret_cast<const FromGroup*>(from + before);
  auto* const to_groups = reinterpret_cast<ToGroup*>(to + before);
  const std::uint32_t groups = (count - before) / kElements;
  for (std::uint32_t i = share.index; i < groups; i += share.count * kUnroll) {
    FromGroup loaded[kUnroll];
    for (std::uint32_t step = 0; step < kUnroll; ++step) {
      if (i + step * share.count < groups) loaded[step] = from_groups[i + step * share.count];
    }
    for (std::uint32_t step = 0; step < kUnroll; ++step) {
      if (i + step * share.count >= groups) continue;
      ToGroup stored;
      for (int each = 0; each < kElements; ++each) stored.at[each] = map(loaded[step].at[each]);
      to_groups[i + step * share.count] = stored;
    }
  }
  for (std::uint32_t i = before + groups * kElements + share.index; i < count; i += share.count)
    to[i] = map(from[i]);
}

/// The same with the largest groups to which both sides can be aligned together. A group has up to
/// 16 bytes on the wider side. Both sides must be aligned to their elements.
template <class From, class To, class Map, int kElements = kGroup<From, To>>
HVD_ON_DEVICE void map_elements(To* to, const From* from, std::uint32_t count, Share share,
                                const Map& map) {
  if constexpr (kElements > 1) {
    const auto apart =
        static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) / sizeof(To)) -
        static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) / sizeof(From));
    if (apart % kElements != 0)
      return map_elements<From, To, Map, kElements / 2>(to, from, count, share, map);
  }
  map_groups<kElements>(to, from, count, share, map);
}

/// Copies this thread's share of whole words.
template <class Word>
HVD_ON_DEVICE void copy_words(std::byte* to, const std::byte* from, std::uint32_t words,
                              Share share) {
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const destination = reinterpret_cast<Word*>(to);
  for (std::uint32_t i = share.index; i < words; i += share.count * kUnroll) {
    Word loaded[kUnroll];
    for (std::uint32_t step = 0; step < kUnroll; ++step) {
      if (i + step * share.count < words) loaded[step] = source[i + step * share.count];
    }
    for (std::uint32_t step = 0; step < kUnroll; ++step) {
      if (i + step * share.count < words) destination[i + step * share.count] = loaded[step];
    }
  }
}

/// Copies bytes with the widest accesses to which both sides can be aligned together.
HVD_ON_DEVICE void copy_bytes(std::byte* to, const std::byte* from, std::uint32_t bytes,
                              Share share) {
  const auto difference = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) ^
                                                     reinterpret_cast<std::uintptr_t>(from)) &
                          15u;
  // Both sides can be aligned to 16 bytes, or to the lowest bit in which their addresses differ.
  const std::uint32_t width = difference == 0 ? 16 : difference & (~difference + 1);
  const auto gap =
      static_cast<std::uint32_t>(-reinterpret_cast<std::uintptr_t>(from) & (width - 1));
  const std::uint32_t before = gap < bytes ? gap : bytes;
  const std::uint32_t words = (bytes - before) / width;
  const std::uint32_t after = before + words * width;
  for (std::uint32_t i = share.index; i < before; i += share.count) to[i] = from[i];
  if (width == 16) copy_words<Group<std::uint32_t, 4>>(to + before, from + before, words, share);
  if (width == 8) copy_words<Group<std::uint32_t, 2>>(to + before, from + before, words, share);
  if (width == 4) copy_words<Group<std::uint32_t, 1>>(to + before, from + before, words, share);
  if (width == 2) copy_words<Group<std::uint16_t, 1>>(to + before, from + before, words, share);
  if (width == 1) copy_words<Group<std::uint8_t, 1>>(to + before, from + before, words, share);
  for (std::uint32_t i = after + share.index; i < bytes; i += share.count) to[i] = from[i];
}

/// Multiplies an element in fp32 (fp64 for fp64) and rounds once. Convert defines the conversions
/// between 16-bit types and float.
template <class From, class To, class Convert>
struct Scale {
  float factor;
  HVD_ON_DEVICE To operator()(const From& element) const {
    To result;
    Convert::narrow(Convert::widen(element) * factor, result);
    return result;
  }
};
template <class Convert>
struct Scale<double, double, Convert> {
  double factor;
  HVD_ON_DEVICE double operator()(const double& element) const { return element * factor; }
};
template <class From, class To, class Convert>
struct Cast {
  HVD_ON_DEVICE To operator()(const From& element) const {
    To result;
    Convert::narrow(Convert::widen(element), result);
    return result;
  }
};

}  // namespace hvd::device
