#pragma once

#include <cstddef>
#include <cstdint>

/// How the threads of a block copy one tile. Compiled by nvcc for the device, and by the C++
/// compiler for the tests, which run the same code thread by thread and compare with a plain loop.
#ifdef __CUDACC__
#define HVD_ON_DEVICE __host__ __device__ __forceinline__
#else
#define HVD_ON_DEVICE inline
#endif

namespace hvd::device {

/// Which of the threads that share a tile this is.
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

/// So many elements that are read or written in one access. May alias: it stands for memory of any
/// type.
template <class Element, int kElements>
struct [[gnu::may_alias]] alignas(sizeof(Element) * kElements) Group {
  Element at[kElements];
};

/// Accesses per thread under way at the same time.
inline constexpr std::uint32_t kUnroll = 4;

template <class From, class To>
inline constexpr int kGroup =
    static_cast<int>(16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To)));

/// Elements before the first at which both sides are aligned to a group; all of them when there is
/// none.
template <class From, class To>
HVD_ON_DEVICE std::uint32_t elements_before_groups(const From* from, const To* to,
                                                   std::uint32_t count) {
  constexpr std::uint32_t kElements = kGroup<From, To>;
  const auto from_element =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) / sizeof(From));
  const auto to_element =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) / sizeof(To));
  const bool elements_aligned = reinterpret_cast<std::uintptr_t>(from) % sizeof(From) == 0 &&
                                reinterpret_cast<std::uintptr_t>(to) % sizeof(To) == 0;
  if (!elements_aligned || from_element % kElements != to_element % kElements) return count;
  const std::uint32_t before = (kElements - from_element % kElements) % kElements;
  return before < count ? before : count;
}

/// to[i] = map(from[i]) for `count` elements, this thread's share of them. Both sides are aligned
/// to their elements.
template <class From, class To, class Map>
HVD_ON_DEVICE void map_elements(To* to, const From* from, std::uint32_t count, Share share,
                                const Map& map) {
  constexpr std::uint32_t kElements = kGroup<From, To>;
  using FromGroup = Group<From, kGroup<From, To>>;
  using ToGroup = Group<To, kGroup<From, To>>;
  const std::uint32_t before = elements_before_groups(from, to, count);
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
      for (int element = 0; element < kGroup<From, To>; ++element)
        stored.at[element] = map(loaded[step].at[element]);
      to_groups[i + step * share.count] = stored;
    }
  }
  for (std::uint32_t i = before + groups * kElements + share.index; i < count; i += share.count)
    to[i] = map(from[i]);
}

/// Copies whole words, this thread's share of them.
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
  // The sides meet at a multiple of 16, or of the lowest bit in which they differ.
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

/// Element by element in fp32 (fp64 for fp64), rounded once. Convert says how a 16-bit type becomes
/// a float and back.
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
