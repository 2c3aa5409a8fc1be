#include "kernels/kernels.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "base/text.h"
#include "hvd/error.h"
#include "kernels/kernels_loop.h"

#if HVD_HAVE_AVX_VARIANTS
#include <cpuid.h>
#endif

namespace hvd {
namespace {

#if HVD_HAVE_AVX_VARIANTS
// __builtin_cpu_supports() accepts "f16c" only from Clang 16 on.
bool has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool combines(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kMin || op == ReduceOp::kMax ||
         op == ReduceOp::kProduct || is_bitwise(op);
}

// Separate from the check, which every small operation runs and which must not build a text.
[[noreturn, gnu::cold]] void refuse(std::size_t sources, std::size_t destinations,
                                    std::int64_t count, DataType dtype, ReduceOp op,
                                    const ReduceScale& scale) {
  const auto error = [&](const auto&... parts) {
    return Error(text("reduce ", to_string(op), " of ", to_string(dtype), ": ", parts...));
  };
  if (sources == 0) throw error("no source was given; expected at least one");
  if (destinations == 0) throw error("no destination was given; expected at least one");
  if (count < 0) throw error("negative count ", count);
  if (size_of(dtype) == 0) throw error("unknown dtype number ", static_cast<int>(dtype));
  if (!combines(op))
    throw error(
        "expected sum, min, max, product, bit_and, bit_or or bit_xor (an average is a sum "
        "with a divisor)");
  if (is_bitwise(op) && is_floating(dtype)) throw error("expected an integer type or bool");
  if (scale.divisor < 1) throw error("expected a divisor of at least 1, got ", scale.divisor);
  throw error(is_bitwise(op) ? "the result of a bitwise operation cannot be scaled"
                             : "a bool cannot be scaled or averaged");
}

void check_reduction(std::size_t sources, std::size_t destinations, std::int64_t count,
                     DataType dtype, ReduceOp op, const ReduceScale& scale) {
  if (sources == 0 || destinations == 0 || count < 0 || size_of(dtype) == 0 || !combines(op) ||
      scale.divisor < 1 || (is_bitwise(op) && is_floating(dtype)) ||
      ((dtype == DataType::kBool || is_bitwise(op)) && !scale.identity())) {
    refuse(sources, destinations, count, dtype, op, scale);
  }
}

// Copies in blocks, so that the source is read from memory once.
void copy_to_all(const std::byte* source, std::span<std::byte* const> destinations,
                 std::size_t size) {
  constexpr std::size_t kBlockBytes = 8192;
  const std::size_t step = destinations.size() == 1 ? size : kBlockBytes;
  for (std::size_t begin = 0; begin < size; begin += step) {
    for (std::byte* const destination : destinations) {
      if (destination != source) {
        std::memcpy(destination + begin, source + begin, std::min(step, size - begin));
      }
    }
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
    case ReduceOp::kBitAnd:
      return std::is_integral_v<T> ? static_cast<T>(-1) : T{0};
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

// The bits of 0, 1, +infinity or -infinity in a 16-bit floating type.
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

bool supports(InstructionSet instructions) noexcept {
  switch (instructions) {
    case InstructionSet::kBaseline:
      return true;
#if HVD_HAVE_AVX_VARIANTS
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") != 0 && has_f16c();
    case InstructionSet::kAvx512:
      return supports(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") != 0 &&
             __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0;
#endif
    default:
      return false;
  }
}

InstructionSet best_instruction_set() noexcept {
  static const InstructionSet best = supports(InstructionSet::kAvx512) ? InstructionSet::kAvx512
                                     : supports(InstructionSet::kAvx2) ? InstructionSet::kAvx2
                                                                       : InstructionSet::kBaseline;
  return best;
}

void reduce_with(InstructionSet instructions, const ReductionArgs& args) {
  switch (args.dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      return reduce_floating(instructions, args);
    case DataType::kBool:
      return reduce_bool(instructions, args);
    default:
      return reduce_integer(instructions, args);
  }
}

}  // namespace kernels

void reduce_to_all(std::span<const std::byte* const> sources,
                   std::span<std::byte* const> destinations, std::int64_t count, DataType dtype,
                   ReduceOp op, const ReduceScale& scale) {
  check_reduction(sources.size(), destinations.size(), count, dtype, op, scale);
  if (count == 0) {
    return;
  }
  if (sources.size() == 1 && scale.identity() && dtype != DataType::kBool) {
    copy_to_all(sources[0], destinations, static_cast<std::size_t>(count) * size_of(dtype));
    return;
  }
  kernels::reduce_with(kernels::best_instruction_set(),
                       {sources, destinations, count, dtype, op, scale});
}

void reduce(std::span<const std::byte* const> sources, std::byte* destination, std::int64_t count,
            DataType dtype, ReduceOp op, const ReduceScale& scale) {
  reduce_to_all(sources, {&destination, 1}, count, dtype, op, scale);
}

namespace {

void reduce_stage(const ReductionStage& stage, bool partial) {
  check_reduction(stage.sources.size(), 1, stage.count, stage.dtype, stage.op, stage.scale);
  if (stage.count == 0) {
    return;
  }
  kernels::reduce_with(kernels::best_instruction_set(), {.sources = stage.sources,
                                                         .destinations = {&stage.destination, 1},
                                                         .count = stage.count,
                                                         .dtype = stage.dtype,
                                                         .op = stage.op,
                                                         .scale = stage.scale,
                                                         .staged = true,
                                                         .before = stage.before,
                                                         .partial = partial});
}

}  // namespace

std::size_t partial_size(DataType dtype, const ReduceScale& scale) noexcept {
  switch (dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      return kernels::partial_size_of_floating(dtype);
    case DataType::kBool:
      return size_of(dtype);
    default:
      return kernels::partial_size_of_integer(dtype, scale);
  }
}

void reduce_partly(const ReductionStage& stage) { reduce_stage(stage, true); }

void reduce_last(const ReductionStage& stage) { reduce_stage(stage, false); }

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
          static_cast<std::uint8_t>(
              op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kBitAnd ? 1 : 0));
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
