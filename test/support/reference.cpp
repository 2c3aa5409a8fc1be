#include "support/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/half.h"

namespace hvd::testing {
namespace {

__extension__ typedef __int128 Int128;

template <class T>
T get(const Bytes& bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(Bytes& bytes, std::size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

std::uint64_t hash(std::uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

double make_float(std::uint64_t bits, ReduceOp op) {
  constexpr double kPowers[] = {1.0, 0.5, 0.25, 0.125, 0.0625, 2.0, 4.0, 8.0};
  const double fraction = 1.0 + static_cast<double>(bits >> 11) * 0x1p-53;  // [1, 2)
  const double sign = (bits & 1) != 0 ? -1.0 : 1.0;
  return sign * fraction * kPowers[(bits >> 1) & (op == ReduceOp::kProduct ? 1 : 7)];
}

void put_value(Bytes& bytes, std::size_t index, DataType dtype, ReduceOp op, std::uint64_t bits) {
  switch (dtype) {
    case DataType::kUInt8:
    case DataType::kInt8:
      return put(bytes, index, static_cast<std::uint8_t>(bits));
    case DataType::kInt16:
      return put(bytes, index, static_cast<std::uint16_t>(bits));
    case DataType::kInt32:
      return put(bytes, index, static_cast<std::uint32_t>(bits));
    case DataType::kInt64:
      return put(bytes, index, bits);
    case DataType::kBool:
      return put(bytes, index, static_cast<std::uint8_t>(bits & 1));
    case DataType::kFloat16:
      return put(bytes, index, float_to_half(static_cast<float>(make_float(bits, op))));
    case DataType::kBFloat16:
      return put(bytes, index, float_to_bfloat16(static_cast<float>(make_float(bits, op))));
    case DataType::kFloat32:
      return put(bytes, index, static_cast<float>(make_float(bits, op)));
    case DataType::kFloat64:
      return put(bytes, index, make_float(bits, op));
  }
}

template <class T>
bool is_nan(T value) {
  return value != value;
}

/// Sum, min, max or product of two floating values.
template <class T>
T combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return is_nan(a) ? a : is_nan(b) ? b : b < a ? b : a;
    case ReduceOp::kMax:
      return is_nan(a) ? a : is_nan(b) ? b : b > a ? b : a;
    default:
      return a + b;
  }
}

/// For fp16 and bf16, `widen` and `narrow` convert; the arithmetic is in Real.
template <class Real, class Storage, class Widen, class Narrow>
void reduce_floats(const std::vector<Bytes>& inputs, Bytes& output, ReduceOp op,
                   const ReduceScale& scale, Widen widen, Narrow narrow) {
  const auto prescale = static_cast<Real>(scale.prescale);
  const auto factor = static_cast<Real>(scale.postscale / static_cast<double>(scale.divisor));
  for (std::size_t i = 0; i < output.size() / sizeof(Storage); ++i) {
    Real result = widen(get<Storage>(inputs[0], i)) * prescale;
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      result = combine<Real>(op, result, widen(get<Storage>(inputs[rank], i)) * prescale);
    }
    put(output, i, static_cast<Storage>(narrow(result * factor)));
  }
}

template <class T>
T truncate(long double value) {
  if (is_nan(value)) {
    return 0;
  }
  const auto lowest = static_cast<long double>(std::numeric_limits<T>::min());
  const auto highest = static_cast<long double>(std::numeric_limits<T>::max());
  return static_cast<T>(std::trunc(std::clamp(value, lowest, highest)));
}

template <class T>
T combine_integers(ReduceOp op, T a, T b) {
  // The sum or product modulo 2^64, cut to T, is the sum or product modulo T's range.
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBitAnd:
      return static_cast<T>(a & b);
    case ReduceOp::kBitOr:
      return static_cast<T>(a | b);
    case ReduceOp::kBitXor:
      return static_cast<T>(a ^ b);
    default:
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
}

template <class T>
void reduce_integers(const std::vector<Bytes>& inputs, Bytes& output, ReduceOp op,
                     const ReduceScale& scale) {
  const bool exact = scale.prescale == 1.0 && scale.postscale == 1.0;
  const auto prescale = static_cast<long double>(scale.prescale);
  for (std::size_t i = 0; i < output.size() / sizeof(T); ++i) {
    T plain = get<T>(inputs[0], i);
    Int128 sum = plain;
    long double extended = static_cast<long double>(plain) * prescale;
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const T value = get<T>(inputs[rank], i);
      plain = combine_integers(op, plain, value);
      sum += value;
      extended = combine<long double>(op, extended, static_cast<long double>(value) * prescale);
    }
    if (!exact) {
      plain = truncate<T>(extended * static_cast<long double>(scale.postscale) /
                          static_cast<long double>(scale.divisor));
    } else if (op == ReduceOp::kSum) {
      plain = scale.divisor == 1 ? plain : static_cast<T>(sum / scale.divisor);
    }
    put(output, i, plain);
  }
}

void reduce_bools(const std::vector<Bytes>& inputs, Bytes& output, ReduceOp op) {
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr;
  for (std::size_t i = 0; i < output.size(); ++i) {
    const auto set = std::count_if(inputs.begin(), inputs.end(),
                                   [i](const Bytes& input) { return input[i] != std::byte{0}; });
    const bool all = set == static_cast<std::ptrdiff_t>(inputs.size());
    output[i] = static_cast<std::byte>(op == ReduceOp::kBitXor ? set % 2 == 1
                                       : is_or                 ? set > 0
                                                               : all);
  }
}

}  // namespace

Bytes make_input(std::int64_t count, DataType dtype, ReduceOp op, int rank, std::uint64_t seed) {
  Bytes bytes(static_cast<std::size_t>(count) * size_of(dtype));
  const std::uint64_t stream = hash(hash(seed) + static_cast<std::uint64_t>(rank));
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    put_value(bytes, i, dtype, op, hash(stream + i));
  }
  return bytes;
}

Bytes reference_reduce(const std::vector<Bytes>& inputs, DataType dtype, ReduceOp op,
                       const ReduceScale& scale) {
  Bytes output(inputs.at(0).size());
  switch (dtype) {
    case DataType::kUInt8:
      reduce_integers<std::uint8_t>(inputs, output, op, scale);
      break;
    case DataType::kInt8:
      reduce_integers<std::int8_t>(inputs, output, op, scale);
      break;
    case DataType::kInt16:
      reduce_integers<std::int16_t>(inputs, output, op, scale);
      break;
    case DataType::kInt32:
      reduce_integers<std::int32_t>(inputs, output, op, scale);
      break;
    case DataType::kInt64:
      reduce_integers<std::int64_t>(inputs, output, op, scale);
      break;
    case DataType::kBool:
      reduce_bools(inputs, output, op);
      break;
    case DataType::kFloat16:
      reduce_floats<float, std::uint16_t>(inputs, output, op, scale, half_to_float, float_to_half);
      break;
    case DataType::kBFloat16:
      reduce_floats<float, std::uint16_t>(inputs, output, op, scale, bfloat16_to_float,
                                          float_to_bfloat16);
      break;
    case DataType::kFloat32:
      reduce_floats<float, float>(
          inputs, output, op, scale, [](float x) { return x; }, [](float x) { return x; });
      break;
    case DataType::kFloat64:
      reduce_floats<double, double>(
          inputs, output, op, scale, [](double x) { return x; }, [](double x) { return x; });
      break;
  }
  return output;
}

Bytes reference_compressed(const std::vector<Bytes>& inputs, Compression compression, ReduceOp op,
                           double prescale, double postscale) {
  const bool half = compression == Compression::kFloat16;
  std::vector<Bytes> narrowed;
  for (const Bytes& input : inputs) {
    Bytes& to = narrowed.emplace_back(input.size() / 2);
    for (std::size_t i = 0; i < input.size() / 4; ++i) {
      const float value = get<float>(input, i) * static_cast<float>(prescale);
      put(to, i, half ? float_to_half(value) : float_to_bfloat16(value));
    }
  }
  const bool enlarges = std::abs(postscale) > 1;
  const ReduceScale scale{1.0, enlarges ? 1.0 : postscale,
                          op == ReduceOp::kAverage ? static_cast<std::int64_t>(inputs.size()) : 1};
  const Bytes reduced = reference_reduce(narrowed, half ? DataType::kFloat16 : DataType::kBFloat16,
                                         op == ReduceOp::kAverage ? ReduceOp::kSum : op, scale);
  Bytes output(inputs.at(0).size());
  for (std::size_t i = 0; i < output.size() / 4; ++i) {
    const auto bits = get<std::uint16_t>(reduced, i);
    const float value = half ? half_to_float(bits) : bfloat16_to_float(bits);
    put(output, i, enlarges ? value * static_cast<float>(postscale) : value);
  }
  return output;
}

std::int64_t first_difference(const std::byte* actual, const Bytes& expected, DataType dtype) {
  if (expected.empty() || std::memcmp(actual, expected.data(), expected.size()) == 0) {
    return -1;
  }
  std::size_t i = 0;
  while (actual[i] == expected[i]) {
    ++i;
  }
  return static_cast<std::int64_t>(i / size_of(dtype));
}

}  // namespace hvd::testing
