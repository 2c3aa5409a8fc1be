#include <limits>

#include "kernels/kernels_loop.h"

namespace hvd::kernels {
namespace {

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UnsignedInt128;

// The unsigned type of T, at least as wide as int. The product of two uint16_t would be computed in
// int and could overflow.
template <class T>
struct Wrapping {
  using Type =
      std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;
};
template <>
struct Wrapping<Int128> {
  using Type = UnsignedInt128;
};

template <ReduceOp op, class T>
HVD_INLINE T combine_integers(T a, T b) {
  using Unsigned = typename Wrapping<T>::Type;
  if constexpr (op == ReduceOp::kSum) {
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else if constexpr (op == ReduceOp::kProduct) {
    return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  } else if constexpr (op == ReduceOp::kMin) {
    return b < a ? b : a;
  } else {
    return a < b ? b : a;
  }
}

/// No factors: computes in the type itself.
template <class T, ReduceOp op>
struct PlainPolicy {
  using Accumulator = T;
  HVD_INLINE T load(const std::byte* source, std::int64_t i) const {
    return kernels::load<T>(source, i);
  }
  HVD_INLINE T combine(T a, T b) const { return combine_integers<op>(a, b); }
  HVD_INLINE T finish(T value) const { return value; }
};

/// A divisor only: computes exactly, in a type that holds every sum.
template <class T, ReduceOp op>
struct QuotientPolicy {
  using Accumulator = std::conditional_t<(sizeof(T) < sizeof(std::int64_t)), std::int64_t, Int128>;
  std::int64_t divisor;
  HVD_INLINE Accumulator load(const std::byte* source, std::int64_t i) const {
    return kernels::load<T>(source, i);
  }
  HVD_INLINE Accumulator combine(Accumulator a, Accumulator b) const {
    return combine_integers<op>(a, b);
  }
  HVD_INLINE T finish(Accumulator value) const { return static_cast<T>(value / divisor); }
};

/// Any factors: computes in long double, which on x86 holds every int64 exactly.
template <class T, ReduceOp op>
struct ExtendedPolicy {
  using Accumulator = long double;
  long double prescale;
  long double postscale;
  long double divisor;
  HVD_INLINE Accumulator load(const std::byte* source, std::int64_t i) const {
    return static_cast<long double>(kernels::load<T>(source, i)) * prescale;
  }
  HVD_INLINE Accumulator combine(Accumulator a, Accumulator b) const {
    if constexpr (op == ReduceOp::kSum) {
      return a + b;
    } else if constexpr (op == ReduceOp::kProduct) {
      return a * b;
    } else if constexpr (op == ReduceOp::kMin) {
      return (a <= b || a != a) ? a : b;
    } else {
      return (a >= b || a != a) ? a : b;
    }
  }
  HVD_INLINE T finish(Accumulator value) const {
    constexpr T kLowest = std::numeric_limits<T>::min();
    constexpr T kHighest = std::numeric_limits<T>::max();
    const long double result = value * postscale / divisor;
    T limited = 0;  // a conversion out of range would be undefined
    if (result >= static_cast<long double>(kHighest)) {
      limited = kHighest;
    } else if (result <= static_cast<long double>(kLowest)) {
      limited = kLowest;
    } else if (result == result) {
      limited = static_cast<T>(result);
    }
    return limited;
  }
};

template <class T>
using Wide = typename QuotientPolicy<T, ReduceOp::kSum>::Accumulator;

bool only_divides(const ReduceScale& scale) noexcept {
  return scale.prescale == 1.0 && scale.postscale == 1.0;
}

/// Bitwise, in an unsigned type of the element's size.
template <class T, ReduceOp op>
struct BitPolicy {
  using Accumulator = T;
  HVD_INLINE T load(const std::byte* source, std::int64_t i) const {
    return kernels::load<T>(source, i);
  }
  HVD_INLINE T combine(T a, T b) const {
    if constexpr (op == ReduceOp::kBitAnd) {
      return static_cast<T>(a & b);
    } else if constexpr (op == ReduceOp::kBitOr) {
      return static_cast<T>(a | b);
    } else {
      return static_cast<T>(a ^ b);
    }
  }
  HVD_INLINE T finish(T value) const { return value; }
};

template <class Policy>
void run_policy(InstructionSet instructions, const ReductionArgs& args, const Policy& policy) {
  args.staged ? run_stage(instructions, args, policy) : run(instructions, args, policy);
}

template <class T>
void reduce_bits(InstructionSet instructions, const ReductionArgs& args) {
  if (args.op == ReduceOp::kBitAnd) {
    run_policy(instructions, args, BitPolicy<T, ReduceOp::kBitAnd>{});
  } else if (args.op == ReduceOp::kBitOr) {
    run_policy(instructions, args, BitPolicy<T, ReduceOp::kBitOr>{});
  } else {
    run_policy(instructions, args, BitPolicy<T, ReduceOp::kBitXor>{});
  }
}

template <class T>
void reduce_type(InstructionSet instructions, const ReductionArgs& args) {
  if (is_bitwise(args.op)) return reduce_bits<std::make_unsigned_t<T>>(instructions, args);
  const ReduceScale& scale = args.scale;
  // Divisions and 80-bit arithmetic do not vectorise.
  const auto run_plainly = [&](const auto& policy) {
    args.staged ? run_stage_baseline(args, policy) : run_baseline(args, policy);
  };
  with_op(args.op, [&](auto op) {
    if (scale.identity()) {
      run_policy(instructions, args, PlainPolicy<T, op.value>{});
    } else if (only_divides(scale)) {
      run_plainly(QuotientPolicy<T, op.value>{scale.divisor});
    } else {
      run_plainly(ExtendedPolicy<T, op.value>{static_cast<long double>(scale.prescale),
                                              static_cast<long double>(scale.postscale),
                                              static_cast<long double>(scale.divisor)});
    }
  });
}

/// Any byte that is not 0 counts as 1.
template <ReduceOp op>
struct BoolPolicy {
  using Accumulator = std::uint8_t;
  HVD_INLINE std::uint8_t load(const std::byte* source, std::int64_t i) const {
    return kernels::load<std::uint8_t>(source, i) != 0 ? 1 : 0;
  }
  HVD_INLINE std::uint8_t combine(std::uint8_t a, std::uint8_t b) const {
    return BitPolicy<std::uint8_t, op>{}.combine(a, b);
  }
  HVD_INLINE std::uint8_t finish(std::uint8_t value) const { return value; }
};

}  // namespace

void reduce_integer(InstructionSet instructions, const ReductionArgs& args) {
  switch (args.dtype) {
    case DataType::kUInt8:
      return reduce_type<std::uint8_t>(instructions, args);
    case DataType::kInt8:
      return reduce_type<std::int8_t>(instructions, args);
    case DataType::kInt16:
      return reduce_type<std::int16_t>(instructions, args);
    case DataType::kInt32:
      return reduce_type<std::int32_t>(instructions, args);
    default:
      return reduce_type<std::int64_t>(instructions, args);
  }
}

std::size_t partial_size_of_integer(DataType dtype, const ReduceScale& scale) noexcept {
  if (scale.identity()) {
    return size_of(dtype);
  }
  if (!only_divides(scale)) {
    return sizeof(long double);
  }
  return dtype == DataType::kInt64 ? sizeof(Wide<std::int64_t>) : sizeof(Wide<std::int32_t>);
}

void reduce_bool(InstructionSet instructions, const ReductionArgs& args) {
  switch (args.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return run_policy(instructions, args, BoolPolicy<ReduceOp::kBitOr>{});
    case ReduceOp::kBitXor:
      return run_policy(instructions, args, BoolPolicy<ReduceOp::kBitXor>{});
    default:
      return run_policy(instructions, args, BoolPolicy<ReduceOp::kBitAnd>{});
  }
}

}  // namespace hvd::kernels
