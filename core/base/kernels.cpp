#include "base/kernels.h"

#include <limits>
#include <string>

#include "base/kernels_loop.h"
#include "hvd/error.h"

namespace hvd {
namespace {

void check_reduction(std::size_t sources, std::int64_t count, DataType dtype, ReduceOp op,
                     const ReduceScale& scale) {
  const std::string what =
      "reduce " + std::string(to_string(op)) + " of " + std::string(to_string(dtype)) + ": ";
  if (sources == 0) {
    throw Error(what + "no source was given; expected at least one");
  }
  if (count < 0) {
    throw Error(what + "negative count " + std::to_string(count));
  }
  if (size_of(dtype) == 0) {
    throw Error(what + "unknown dtype number " + std::to_string(static_cast<int>(dtype)));
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kMin && op != ReduceOp::kMax &&
      op != ReduceOp::kProduct) {
    throw Error(what + "expected sum, min, max or product (an average is a sum with a divisor)");
  }
  if (scale.divisor < 1) {
    throw Error(what + "expected a divisor of at least 1, got " + std::to_string(scale.divisor));
  }
  if (dtype == DataType::kBool && !scale.identity()) {
    throw Error(what + "a bool cannot be scaled or averaged");
  }
}

template <class T>
T identity_of(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::kProduct:
      return T{1};
    case ReduceOp::kMin:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case ReduceOp::kMax:
      return Limits::has_infinity ? static_cast<T>(-Limits::infinity()) : Limits::lowest();
    default:
      return T{0};
  }
}

template <class T>
void fill(std::byte* destination, std::int64_t count, T value) {
  for (std::int64_t i = 0; i < count; ++i) {
    kernels::store(destination, i, value);
  }
}

// Bits of 0, 1, +infinity and -infinity in a 16-bit floating type.
std::uint16_t identity_of_16(ReduceOp op, std::uint16_t one, std::uint16_t infinity) {
  switch (op) {
    case ReduceOp::kProduct:
      return one;
    case ReduceOp::kMin:
      return infinity;
    case ReduceOp::kMax:
      return static_cast<std::uint16_t>(infinity | 0x8000u);
    default:
      return 0;
  }
}

}  // namespace

namespace kernels {

InstructionSet best_instruction_set() noexcept {
#if HVD_HAVE_AVX2_VARIANT
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
  return has_avx2 ? InstructionSet::kAvx2 : InstructionSet::kBaseline;
#else
  return InstructionSet::kBaseline;
#endif
}

void reduce_with(InstructionSet instructions, const Job& job) {
  switch (job.dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      return reduce_floating(instructions, job);
    case DataType::kBool:
      return reduce_bool(instructions, job);
    default:
      return reduce_integer(instructions, job);
  }
}

}  // namespace kernels

void reduce(std::span<const std::byte* const> sources, std::byte* destination, std::int64_t count,
            DataType dtype, ReduceOp op, const ReduceScale& scale) {
  check_reduction(sources.size(), count, dtype, op, scale);
  if (count == 0) {
    return;
  }
  if (sources.size() == 1 && scale.identity() && dtype != DataType::kBool) {
    if (sources[0] != destination) {
      std::memcpy(destination, sources[0], static_cast<std::size_t>(count) * size_of(dtype));
    }
    return;
  }
  kernels::reduce_with(kernels::best_instruction_set(),
                       {sources, destination, count, dtype, op, scale});
}

void fill_identity(std::byte* destination, std::int64_t count, DataType dtype, ReduceOp op) {
  switch (dtype) {
    case DataType::kUInt8:
      return fill(destination, count, identity_of<std::uint8_t>(op));
    case DataType::kInt8:
      return fill(destination, count, identity_of<std::int8_t>(op));
    case DataType::kInt16:
      return fill(destination, count, identity_of<std::int16_t>(op));
    case DataType::kInt32:
      return fill(destination, count, identity_of<std::int32_t>(op));
    case DataType::kInt64:
      return fill(destination, count, identity_of<std::int64_t>(op));
    case DataType::kBool:
      return fill(
          destination, count,
          static_cast<std::uint8_t>(op == ReduceOp::kProduct || op == ReduceOp::kMin ? 1 : 0));
    case DataType::kFloat16:
      return fill(destination, count, identity_of_16(op, 0x3c00, 0x7c00));
    case DataType::kBFloat16:
      return fill(destination, count, identity_of_16(op, 0x3f80, 0x7f80));
    case DataType::kFloat32:
      return fill(destination, count, identity_of<float>(op));
    case DataType::kFloat64:
      return fill(destination, count, identity_of<double>(op));
  }
}

}  // namespace hvd
