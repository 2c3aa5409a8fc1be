#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/kernels.h"

/// Inside of the reduction kernels: the loop that every element type shares, and the choice of
/// instruction set.
namespace hvd::kernels {

enum class InstructionSet { kBaseline, kAvx2 };

/// What this processor runs best.
InstructionSet best_instruction_set() noexcept;

struct Job {
  std::span<const std::byte* const> sources;
  std::byte* destination;
  std::int64_t count;
  DataType dtype;
  ReduceOp op;
  ReduceScale scale;
};

/// The arguments are already checked, count > 0. Every instruction set gives the same bits (only
/// the payload of a NaN made from two NaNs may differ).
void reduce_floating(InstructionSet, const Job&);
void reduce_integer(InstructionSet, const Job&);
void reduce_bool(InstructionSet, const Job&);
/// Any dtype. The entry for tests; reduce() checks and calls it.
void reduce_with(InstructionSet, const Job&);

// The code below is always inlined into one of two callers, one of them compiled for AVX2. As
// nothing of it is emitted on its own, the linker cannot pick an AVX2 copy for a processor that
// lacks it, which is the usual end of per-file -mavx2.
#define HVD_INLINE [[gnu::always_inline]] inline
#if defined(__x86_64__)
#define HVD_HAVE_AVX2_VARIANT 1
#define HVD_TARGET_AVX2 [[gnu::target("avx2,f16c")]]
#else
#define HVD_HAVE_AVX2_VARIANT 0
#endif

template <class T>
HVD_INLINE T load(const std::byte* data, std::int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
HVD_INLINE void store(std::byte* data, std::int64_t index, T value) {
  std::memcpy(data + index * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

/// Elements per block with three and more sources: the accumulators stay in the L1 cache.
inline constexpr std::int64_t kBlock = 1024;

/// Policy: `Accumulator`; load(source, i) -> Accumulator; combine(a, b) -> Accumulator;
/// finish(destination, i, accumulator).
///
/// ivdep: the destination is a source or overlaps none, so an iteration reads nothing that another
/// one writes.
template <class Policy>
HVD_INLINE void reduce_loop(const Job& job, const Policy policy) {
  const std::byte* const* const sources = job.sources.data();
  const std::size_t source_count = job.sources.size();
  std::byte* const destination = job.destination;
  const std::int64_t count = job.count;
  if (source_count == 1) {
    const std::byte* const only = sources[0];
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) {
      policy.finish(destination, i, policy.load(only, i));
    }
    return;
  }
  const std::byte* const first = sources[0];
  const std::byte* const second = sources[1];
  const std::byte* const last = sources[source_count - 1];
  if (source_count == 2) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) {
      policy.finish(destination, i, policy.combine(policy.load(first, i), policy.load(second, i)));
    }
    return;
  }
  alignas(64) typename Policy::Accumulator block[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t length = count - begin < kBlock ? count - begin : kBlock;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < length; ++i) {
      block[i] = policy.combine(policy.load(first, begin + i), policy.load(second, begin + i));
    }
    for (std::size_t source = 2; source + 1 < source_count; ++source) {
      const std::byte* const middle = sources[source];
#pragma GCC ivdep
      for (std::int64_t i = 0; i < length; ++i) {
        block[i] = policy.combine(block[i], policy.load(middle, begin + i));
      }
    }
    // Last, as the destination may be any source: all others have been read for this block.
#pragma GCC ivdep
    for (std::int64_t i = 0; i < length; ++i) {
      policy.finish(destination, begin + i, policy.combine(block[i], policy.load(last, begin + i)));
    }
  }
}

template <class Policy>
void run_baseline(const Job& job, const Policy& policy) {
  reduce_loop(job, policy);
}

#if HVD_HAVE_AVX2_VARIANT
template <class Policy>
HVD_TARGET_AVX2 void run_avx2(const Job& job, const Policy& policy) {
  reduce_loop(job, policy);
}
#endif

template <class Policy>
void run([[maybe_unused]] InstructionSet instructions, const Job& job, const Policy& policy) {
#if HVD_HAVE_AVX2_VARIANT
  if (instructions == InstructionSet::kAvx2) {
    run_avx2(job, policy);
    return;
  }
#endif
  run_baseline(job, policy);
}

template <ReduceOp op>
using OpConstant = std::integral_constant<ReduceOp, op>;

/// Calls function(OpConstant<op>()), so that the operation is a constant in the loop.
template <class Function>
void with_op(ReduceOp op, const Function& function) {
  switch (op) {
    case ReduceOp::kMin:
      return function(OpConstant<ReduceOp::kMin>());
    case ReduceOp::kMax:
      return function(OpConstant<ReduceOp::kMax>());
    case ReduceOp::kProduct:
      return function(OpConstant<ReduceOp::kProduct>());
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
      return function(OpConstant<ReduceOp::kSum>());
  }
}

}  // namespace hvd::kernels
