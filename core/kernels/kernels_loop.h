#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "kernels/kernels.h"

/// Internals of the reduction kernels: the loop that all element types share, and the choice of the
/// instruction set.
namespace hvd::kernels {

/// In ascending order of preference.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

/// Whether the processor and the operating system support it.
bool supports(InstructionSet) noexcept;
/// The best instruction set that this processor supports.
InstructionSet best_instruction_set() noexcept;

struct ReductionArgs {
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> destinations;  ///< at least one
  std::int64_t count;
  DataType dtype;
  ReduceOp op;
  ReduceScale scale;
  bool staged = false;                ///< one stage of a reduction, with one destination
  const std::byte* before = nullptr;  ///< output of the previous stage; null for the first
  bool partial = false;               ///< not the last stage: writes accumulators
};

/// The caller has checked the arguments, and count > 0. All instruction sets give the same bits,
/// except for the payload of a NaN that comes from two NaNs.
void reduce_floating(InstructionSet, const ReductionArgs&);
void reduce_integer(InstructionSet, const ReductionArgs&);
void reduce_bool(InstructionSet, const ReductionArgs&);
/// Bytes of an accumulator.
std::size_t partial_size_of_floating(DataType) noexcept;
std::size_t partial_size_of_integer(DataType, const ReduceScale&) noexcept;
/// Reduces any dtype. Called by reduce(), which checks the arguments, and by tests.
void reduce_with(InstructionSet, const ReductionArgs&);

// The code below is always inlined into its callers, each of which is compiled for one instruction
// set. No copy of it is emitted on its own, so the linker cannot pick an AVX copy for a processor
// without AVX, as it can with -mavx2 for single files. target_clones cannot replace this: Clang 14
// refuses it for templates, and GCC 12 refuses f16c and avx512bw in it.
#define HVD_INLINE [[gnu::always_inline]] inline
// Marks a loop in which no iteration reads memory that another iteration writes.
#if defined(__clang__)
#define HVD_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define HVD_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
#if defined(__x86_64__)
#define HVD_HAVE_AVX_VARIANTS 1
#define HVD_TARGET_AVX2 [[gnu::target("avx2,f16c")]]
// By default the compiler may use only 256 of the 512 bits.
#if defined(__clang__)
#define HVD_TARGET_AVX512 \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), clang::min_vector_width(512)]]
#else
#define HVD_TARGET_AVX512 \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")]]
#endif
#else
#define HVD_HAVE_AVX_VARIANTS 0
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

/// Elements of a block, which stays in the L1 cache while several passes go over it.
inline constexpr std::int64_t kBlock = 1024;

/// Reduces [begin, end) of all sources into the first destination. With more than two sources the
/// range has at most kBlock elements.
template <class Policy>
HVD_INLINE void reduce_range(const ReductionArgs& args, const Policy policy, std::int64_t begin,
                             std::int64_t end) {
  const std::byte* const* const sources = args.sources.data();
  const std::size_t source_count = args.sources.size();
  std::byte* const destination = args.destinations.data()[0];
  const std::byte* const first = sources[0];
  if (source_count == 1) {
    HVD_INDEPENDENT_ITERATIONS
    for (std::int64_t i = begin; i < end; ++i) {
      store(destination, i, policy.finish(policy.load(first, i)));
    }
    return;
  }
  const std::byte* const second = sources[1];
  if (source_count == 2) {
    HVD_INDEPENDENT_ITERATIONS
    for (std::int64_t i = begin; i < end; ++i) {
      store(destination, i,
            policy.finish(policy.combine(policy.load(first, i), policy.load(second, i))));
    }
    return;
  }
  alignas(64) typename Policy::Accumulator block[kBlock];
  const std::int64_t length = end - begin;
  HVD_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < length; ++i) {
    block[i] = policy.combine(policy.load(first, begin + i), policy.load(second, begin + i));
  }
  for (std::size_t source = 2; source + 1 < source_count; ++source) {
    const std::byte* const middle = sources[source];
    HVD_INDEPENDENT_ITERATIONS
    for (std::int64_t i = 0; i < length; ++i) {
      block[i] = policy.combine(block[i], policy.load(middle, begin + i));
    }
  }
  const std::byte* const last = sources[source_count - 1];
  // The only loop that writes, because the destination may be any source: all other sources of this
  // block have been read.
  HVD_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < length; ++i) {
    store(destination, begin + i,
          policy.finish(policy.combine(block[i], policy.load(last, begin + i))));
  }
}

/// Policy: `Accumulator`; load(source, i) -> Accumulator; combine(a, b) -> Accumulator;
/// finish(accumulator) -> an element.
///
/// Iterations are independent: a destination is a source or does not overlap any, so no iteration
/// reads memory that another one writes.
template <class Policy>
HVD_INLINE void reduce_loop(const ReductionArgs& args, const Policy policy) {
  const std::size_t source_count = args.sources.size();
  const std::size_t destination_count = args.destinations.size();
  std::byte* const* const destinations = args.destinations.data();
  const std::int64_t count = args.count;
  if (source_count == 2 && destination_count == 2) {
    // If all data is in a cache, writing both in one loop takes 0.7 of the time that a copy per
    // block takes.
    const std::byte* const first = args.sources.data()[0];
    const std::byte* const second = args.sources.data()[1];
    std::byte* const to_first = destinations[0];
    std::byte* const to_second = destinations[1];
    HVD_INDEPENDENT_ITERATIONS
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value =
          policy.finish(policy.combine(policy.load(first, i), policy.load(second, i)));
      store(to_first, i, value);
      store(to_second, i, value);
    }
    return;
  }
  constexpr std::size_t kSize = sizeof(policy.finish(typename Policy::Accumulator{}));
  const std::int64_t step = source_count <= 2 && destination_count == 1 ? count : kBlock;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t end = count - begin < step ? count : begin + step;
    reduce_range(args, policy, begin, end);
    const std::size_t offset = static_cast<std::size_t>(begin) * kSize;
    const std::size_t size = static_cast<std::size_t>(end - begin) * kSize;
    for (std::size_t other = 1; other < destination_count; ++other) {
      std::memcpy(destinations[other] + offset, destinations[0] + offset, size);
    }
  }
}

template <class Policy>
void run_baseline(const ReductionArgs& args, const Policy& policy) {
  reduce_loop(args, policy);
}

#if HVD_HAVE_AVX_VARIANTS
template <class Policy>
HVD_TARGET_AVX2 void run_avx2(const ReductionArgs& args, const Policy& policy) {
  reduce_loop(args, policy);
}

template <class Policy>
HVD_TARGET_AVX512 void run_avx512(const ReductionArgs& args, const Policy& policy) {
  reduce_loop(args, policy);
}
#endif

template <class Policy>
void run([[maybe_unused]] InstructionSet instructions, const ReductionArgs& args,
         const Policy& policy) {
#if HVD_HAVE_AVX_VARIANTS
  if (instructions == InstructionSet::kAvx512) {
    run_avx512(args, policy);
    return;
  }
  if (instructions == InstructionSet::kAvx2) {
    run_avx2(args, policy);
    return;
  }
#endif
  run_baseline(args, policy);
}

/// Runs one stage of a reduction, block by block.
template <class Policy>
HVD_INLINE void stage_loop(const ReductionArgs& args, const Policy policy) {
  using Accumulator = typename Policy::Accumulator;
  const std::byte* const* const sources = args.sources.data();
  const std::size_t source_count = args.sources.size();
  std::byte* const destination = args.destinations.data()[0];
  alignas(64) Accumulator block[kBlock];
  for (std::int64_t begin = 0; begin < args.count; begin += kBlock) {
    const std::int64_t length = args.count - begin < kBlock ? args.count - begin : kBlock;
    std::size_t source = 0;
    if (args.before != nullptr) {
      for (std::int64_t i = 0; i < length; ++i) {
        block[i] = kernels::load<Accumulator>(args.before, begin + i);
      }
    } else {
      const std::byte* const first = sources[source++];
      for (std::int64_t i = 0; i < length; ++i) {
        block[i] = policy.load(first, begin + i);
      }
    }
    for (; source < source_count; ++source) {
      const std::byte* const next = sources[source];
      for (std::int64_t i = 0; i < length; ++i) {
        block[i] = policy.combine(block[i], policy.load(next, begin + i));
      }
    }
    if (args.partial) {
      for (std::int64_t i = 0; i < length; ++i) {
        store(destination, begin + i, block[i]);
      }
    } else {
      for (std::int64_t i = 0; i < length; ++i) {
        store(destination, begin + i, policy.finish(block[i]));
      }
    }
  }
}

template <class Policy>
void run_stage_baseline(const ReductionArgs& args, const Policy& policy) {
  stage_loop(args, policy);
}

#if HVD_HAVE_AVX_VARIANTS
template <class Policy>
HVD_TARGET_AVX2 void run_stage_avx2(const ReductionArgs& args, const Policy& policy) {
  stage_loop(args, policy);
}
#endif

/// There is no AVX-512 variant, because the network limits a stage, not this loop.
template <class Policy>
void run_stage([[maybe_unused]] InstructionSet instructions, const ReductionArgs& args,
               const Policy& policy) {
#if HVD_HAVE_AVX_VARIANTS
  if (instructions != InstructionSet::kBaseline) {
    run_stage_avx2(args, policy);
    return;
  }
#endif
  run_stage_baseline(args, policy);
}

template <ReduceOp op>
using OpConstant = std::integral_constant<ReduceOp, op>;

/// Calls function(OpConstant<op>()), so that the operation is a constant in the loop. Does not call
/// it for bitwise operations, which have their own loops.
template <class Function>
void with_op(ReduceOp op, const Function& function) {
  switch (op) {
    case ReduceOp::kMin:
      return function(OpConstant<ReduceOp::kMin>());
    case ReduceOp::kMax:
      return function(OpConstant<ReduceOp::kMax>());
    case ReduceOp::kProduct:
      return function(OpConstant<ReduceOp::kProduct>());
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return;
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAverageOfSet:
    case ReduceOp::kAdasum:
      return function(OpConstant<ReduceOp::kSum>());
  }
}

}  // namespace hvd::kernels
