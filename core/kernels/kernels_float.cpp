#include <algorithm>
#include <bit>

#include "kernels/half.h"
#include "kernels/kernels_loop.h"

#if HVD_HAVE_AVX_VARIANTS
#include <immintrin.h>
#endif

namespace hvd::kernels {
namespace {

// Each case takes one or two instructions per vector. A NaN on either side gives NaN. The first of
// two equal values is kept.
template <ReduceOp op, class T>
HVD_INLINE T combine_floats(T a, T b) {
  if constexpr (op == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (op == ReduceOp::kProduct) {
    return a * b;
  } else if constexpr (op == ReduceOp::kMin) {
    return ((a <= b) | (a != a)) ? a : b;
  } else {
    return ((a >= b) | (a != a)) ? a : b;
  }
}

struct Float32Format {
  using Storage = float;
  using Accumulator = float;
  HVD_INLINE static float widen(float value) { return value; }
  HVD_INLINE static float narrow(float value) { return value; }
};
struct Float64Format {
  using Storage = double;
  using Accumulator = double;
  HVD_INLINE static double widen(double value) { return value; }
  HVD_INLINE static double narrow(double value) { return value; }
};
struct Float16Format {
  using Storage = std::uint16_t;
  using Accumulator = float;
  HVD_INLINE static float widen(std::uint16_t value) { return half_to_float(value); }
  HVD_INLINE static std::uint16_t narrow(float value) { return float_to_half(value); }
};
struct BFloat16Format {
  using Storage = std::uint16_t;
  using Accumulator = float;
  HVD_INLINE static float widen(std::uint16_t value) { return bfloat16_to_float(value); }
  HVD_INLINE static std::uint16_t narrow(float value) { return float_to_bfloat16(value); }
};

template <class Format, ReduceOp op, bool scaled>
struct FloatPolicy {
  using Accumulator = typename Format::Accumulator;
  Accumulator prescale;
  Accumulator postscale;  ///< divided by the divisor

  explicit FloatPolicy(const ReduceScale& scale)
      : prescale(static_cast<Accumulator>(scale.prescale)),
        postscale(static_cast<Accumulator>(scale.postscale / static_cast<double>(scale.divisor))) {}

  HVD_INLINE Accumulator load(const std::byte* source, std::int64_t i) const {
    const Accumulator value = Format::widen(kernels::load<typename Format::Storage>(source, i));
    return scaled ? value * prescale : value;
  }
  HVD_INLINE Accumulator combine(Accumulator a, Accumulator b) const {
    return combine_floats<op>(a, b);
  }
  HVD_INLINE typename Format::Storage finish(Accumulator value) const {
    return Format::narrow(scaled ? value * postscale : value);
  }
};

/// Two adjacent bf16, each in its half of a 32-bit word. No value moves between lanes, so this
/// takes half the time of single elements.
template <ReduceOp op, bool scaled>
struct BFloat16PairPolicy {
  struct Accumulator {
    float low;
    float high;
  };
  FloatPolicy<BFloat16Format, op, scaled> single;

  HVD_INLINE Accumulator load(const std::byte* source, std::int64_t i) const {
    const auto bits = kernels::load<std::uint32_t>(source, i);
    const auto low = std::bit_cast<float>(bits << 16);
    const auto high = std::bit_cast<float>(bits & 0xffff0000u);
    return scaled ? Accumulator{low * single.prescale, high * single.prescale}
                  : Accumulator{low, high};
  }
  HVD_INLINE Accumulator combine(Accumulator a, Accumulator b) const {
    return {combine_floats<op>(a.low, b.low), combine_floats<op>(a.high, b.high)};
  }
  HVD_INLINE std::uint32_t finish(Accumulator value) const {
    return single.finish(value.low) | static_cast<std::uint32_t>(single.finish(value.high)) << 16;
  }
};

/// Reduces the elements from `begin` on, which are too few for a vector.
template <class Policy>
HVD_INLINE void reduce_rest(const ReductionArgs& args, const Policy& policy, std::int64_t begin) {
  const std::byte* const* const sources = args.sources.data();
  for (std::int64_t i = begin; i < args.count; ++i) {
    typename Policy::Accumulator sum = policy.load(sources[0], i);
    for (std::size_t source = 1; source < args.sources.size(); ++source) {
      sum = policy.combine(sum, policy.load(sources[source], i));
    }
    const auto result = policy.finish(sum);
    for (std::byte* const destination : args.destinations) {
      store(destination, i, result);
    }
  }
}

#if HVD_HAVE_AVX_VARIANTS

/// Reduces eight fp16 at a time, all sources in one pass, with the same arithmetic per element as
/// the common loop, which does the rest. Also used with AVX-512: sixteen at a time are not faster,
/// because the conversions then take two steps (measured on Zen 4). The template's numbers are the
/// numbers of sources and destinations, or 0 if they are known only at run time.
template <std::size_t sources_known, std::size_t destinations_known, ReduceOp op, bool scaled>
HVD_TARGET_AVX2 void reduce_half_f16c(const ReductionArgs& args,
                                      const FloatPolicy<Float16Format, op, scaled>& policy) {
  constexpr std::int64_t kLanes = 8;
  const std::size_t source_count = sources_known != 0 ? sources_known : args.sources.size();
  const std::size_t destination_count =
      destinations_known != 0 ? destinations_known : args.destinations.size();
  // Copies the pointers if their number is known. Without copies the compiler has to assume that a
  // store changes the pointers, and reads them again for every vector.
  const std::byte* source_copies[sources_known + 1];
  std::copy_n(args.sources.data(), sources_known, source_copies);
  const std::byte* const* const sources = sources_known != 0 ? source_copies : args.sources.data();
  std::byte* destination_copies[destinations_known + 1];
  std::copy_n(args.destinations.data(), destinations_known, destination_copies);
  std::byte* const* const destinations =
      destinations_known != 0 ? destination_copies : args.destinations.data();
  const __m256 prescale = _mm256_set1_ps(policy.prescale);
  const __m256 postscale = _mm256_set1_ps(policy.postscale);
  const std::int64_t whole = args.count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    __m256 sum = _mm256_setzero_ps();
    for (std::size_t source = 0; source < source_count; ++source) {
      __m256 value = _mm256_cvtph_ps(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(sources[source] + 2 * i)));
      if constexpr (scaled) {
        value *= prescale;
      }
      if (source == 0) {
        sum = value;
      } else if constexpr (op == ReduceOp::kSum) {
        sum += value;
      } else if constexpr (op == ReduceOp::kProduct) {
        sum *= value;
      } else {
        constexpr int kOrdered = op == ReduceOp::kMin ? _CMP_LE_OQ : _CMP_GE_OQ;
        const __m256 keep = _mm256_or_ps(_mm256_cmp_ps(sum, value, kOrdered),
                                         _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
        sum = _mm256_blendv_ps(value, sum, keep);
      }
    }
    if constexpr (scaled) {
      sum *= postscale;
    }
    const __m128i halves = _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT);
    for (std::size_t destination = 0; destination < destination_count; ++destination) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(destinations[destination] + 2 * i), halves);
    }
  }
  reduce_rest(args, policy, whole);
}

#endif

template <class Format, ReduceOp op, bool scaled>
void run_float(InstructionSet instructions, const ReductionArgs& args) {
  const FloatPolicy<Format, op, scaled> policy(args.scale);
  if (args.staged) {
    run_stage(instructions, args, policy);
    return;
  }
#if HVD_HAVE_AVX_VARIANTS
  if constexpr (std::is_same_v<Format, Float16Format>) {
    if (instructions == InstructionSet::kBaseline) {
      run_baseline(args, policy);
    } else if (args.sources.size() == 2 && args.destinations.size() == 2) {
      reduce_half_f16c<2, 2>(args, policy);
    } else if (args.sources.size() == 2 && args.destinations.size() == 1) {
      reduce_half_f16c<2, 1>(args, policy);
    } else {
      reduce_half_f16c<0, 0>(args, policy);
    }
    return;
  }
#endif
  if constexpr (std::is_same_v<Format, BFloat16Format>) {
    ReductionArgs pairs = args;
    pairs.count = args.count / 2;
    run(instructions, pairs, BFloat16PairPolicy<op, scaled>{policy});
    reduce_rest(args, policy, 2 * pairs.count);
  } else {
    run(instructions, args, policy);
  }
}

template <class Format>
void reduce_format(InstructionSet instructions, const ReductionArgs& args) {
  with_op(args.op, [&](auto op) {
    if (args.scale.identity()) {
      run_float<Format, op.value, false>(instructions, args);
    } else {
      run_float<Format, op.value, true>(instructions, args);
    }
  });
}

}  // namespace

std::size_t partial_size_of_floating(DataType dtype) noexcept {
  return dtype == DataType::kFloat64 ? sizeof(Float64Format::Accumulator)
                                     : sizeof(Float32Format::Accumulator);
}

void reduce_floating(InstructionSet instructions, const ReductionArgs& args) {
  switch (args.dtype) {
    case DataType::kFloat16:
      return reduce_format<Float16Format>(instructions, args);
    case DataType::kBFloat16:
      return reduce_format<BFloat16Format>(instructions, args);
    case DataType::kFloat64:
      return reduce_format<Float64Format>(instructions, args);
    default:
      return reduce_format<Float32Format>(instructions, args);
  }
}

}  // namespace hvd::kernels
