#include "kernels/cast.h"

#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "kernels/half.h"
#include "kernels/kernels_loop.h"

#if HVD_HAVE_AVX_VARIANTS
#include <immintrin.h>
#endif

namespace hvd::kernels {
namespace {

struct NarrowToHalf {
  using From = float;
  float factor;
  HVD_INLINE std::uint16_t operator()(float value) const { return float_to_half(value * factor); }
};
struct NarrowToBFloat {
  using From = float;
  float factor;
  HVD_INLINE std::uint16_t operator()(float value) const {
    return float_to_bfloat16(value * factor);
  }
};
struct WidenHalf {
  using From = std::uint16_t;
  float factor;
  HVD_INLINE float operator()(std::uint16_t value) const { return half_to_float(value) * factor; }
};
struct WidenBFloat {
  using From = std::uint16_t;
  float factor;
  HVD_INLINE float operator()(std::uint16_t value) const {
    return bfloat16_to_float(value) * factor;
  }
};

template <class Map>
HVD_INLINE void map_range(const Map map, const std::byte* from, std::byte* to, std::int64_t begin,
                          std::int64_t end) {
  HVD_INDEPENDENT_ITERATIONS
  for (std::int64_t i = begin; i < end; ++i) store(to, i, map(load<typename Map::From>(from, i)));
}

template <class Map>
void map_baseline(const Map& map, const std::byte* from, std::byte* to, std::int64_t count) {
  map_range(map, from, to, 0, count);
}

#if HVD_HAVE_AVX_VARIANTS

template <class Map>
HVD_TARGET_AVX2 void map_avx2(const Map& map, const std::byte* from, std::byte* to,
                              std::int64_t count) {
  map_range(map, from, to, 0, count);
}

template <class Map>
HVD_TARGET_AVX512 void map_avx512(const Map& map, const std::byte* from, std::byte* to,
                                  std::int64_t count) {
  map_range(map, from, to, 0, count);
}

// fp16 with the processor's conversions, which give the same bits as float_to_half() and
// half_to_float().
constexpr std::int64_t kLanes = 8;

HVD_TARGET_AVX2 void narrow_f16c(const NarrowToHalf& map, const std::byte* from, std::byte* to,
                                 std::int64_t count) {
  const __m256 factor = _mm256_set1_ps(map.factor);
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    const __m256 value =
        _mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(from + 4 * i)), factor);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  map_range(map, from, to, whole, count);
}

HVD_TARGET_AVX2 void widen_f16c(const WidenHalf& map, const std::byte* from, std::byte* to,
                                std::int64_t count) {
  const __m256 factor = _mm256_set1_ps(map.factor);
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    const __m256 value =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i)));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + 4 * i), _mm256_mul_ps(value, factor));
  }
  map_range(map, from, to, whole, count);
}

#endif

template <class Map>
void run_map([[maybe_unused]] InstructionSet instructions, const Map& map, const std::byte* from,
             std::byte* to, std::int64_t count) {
#if HVD_HAVE_AVX_VARIANTS
  if (instructions != InstructionSet::kBaseline) {
    if constexpr (std::is_same_v<Map, NarrowToHalf>) return narrow_f16c(map, from, to, count);
    if constexpr (std::is_same_v<Map, WidenHalf>) return widen_f16c(map, from, to, count);
  }
  if (instructions == InstructionSet::kAvx512) return map_avx512(map, from, to, count);
  if (instructions == InstructionSet::kAvx2) return map_avx2(map, from, to, count);
#endif
  map_baseline(map, from, to, count);
}

template <class MapHalf, class MapBFloat>
void cast(InstructionSet instructions, const std::byte* from, std::byte* to, std::int64_t count,
          DataType type, double factor) {
  HVD_EXPECT(supports(instructions), "the processor has these instructions");
  const auto by = static_cast<float>(factor);
  if (type == DataType::kFloat16) return run_map(instructions, MapHalf{by}, from, to, count);
  if (type == DataType::kBFloat16) return run_map(instructions, MapBFloat{by}, from, to, count);
  throw Error(text("cast: expected float16 or bfloat16 on the narrow side, got ", to_string(type)));
}

}  // namespace

void narrow_with(InstructionSet instructions, const std::byte* from, std::byte* to,
                 std::int64_t count, DataType type, double factor) {
  cast<NarrowToHalf, NarrowToBFloat>(instructions, from, to, count, type, factor);
}

void widen_with(InstructionSet instructions, const std::byte* from, std::byte* to,
                std::int64_t count, DataType type, double factor) {
  cast<WidenHalf, WidenBFloat>(instructions, from, to, count, type, factor);
}

}  // namespace hvd::kernels

namespace hvd {

void narrow(const std::byte* from, std::byte* to, std::int64_t count, DataType type,
            double factor) {
  kernels::narrow_with(kernels::best_instruction_set(), from, to, count, type, factor);
}

void widen(const std::byte* from, std::byte* to, std::int64_t count, DataType type, double factor) {
  kernels::widen_with(kernels::best_instruction_set(), from, to, count, type, factor);
}

}  // namespace hvd
