#include "reducer/fingerprint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

namespace hvd::libtorch {
namespace {

constexpr std::size_t kSigns = 1024;
/// Units of a projection in one tolerance.
constexpr double kSteps = 16;
constexpr double kLargestProjection = std::numeric_limits<std::int32_t>::max();
/// Tensors on a GPU are concatenated up to this number of elements.
constexpr std::int64_t kChunk = std::int64_t{16} << 20;

std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

/// A pseudo-random sequence of 1 and -1.
const std::array<float, kSigns>& signs() {
  static const std::array<float, kSigns> table = [] {
    std::array<float, kSigns> values{};
    for (std::size_t i = 0; i < kSigns; ++i) values[i] = (mixed(i + 1) & 1U) != 0 ? 1.0F : -1.0F;
    return values;
  }();
  return table;
}

std::uint64_t hash_of(const std::byte* bytes, std::size_t count) {
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + i + 8 * lane, 8);
      lanes[lane] = std::rotl((lanes[lane] ^ word) * 0x9e3779b97f4a7c15U, 29);
    }
  }
  std::uint64_t hash = count;
  for (; i < count; ++i) hash = hash * 257 + static_cast<std::uint64_t>(bytes[i]);
  for (const std::uint64_t lane : lanes) hash = mixed(hash ^ lane);
  return hash;
}

struct Sums {
  double along = 0;  ///< sum of the values times their signs
  double squares = 0;
};

template <class T>
Sums sums_of(const T* values, std::int64_t count) {
  constexpr std::size_t kLanes = 16;
  const float* const sign = signs().data();
  Sums sums;
  for (std::int64_t begin = 0; begin < count; begin += static_cast<std::int64_t>(kSigns)) {
    const T* const block = values + begin;
    const auto length = static_cast<std::size_t>(std::min<std::int64_t>(count - begin, kSigns));
    std::array<T, kLanes> along{};
    std::array<T, kLanes> squares{};
    const auto add = [&](std::size_t i, std::size_t lane) {
      along[lane] += static_cast<T>(sign[i]) * block[i];
      squares[lane] += block[i] * block[i];
    };
    std::size_t i = 0;
    for (; i + kLanes <= length; i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (; i < length; ++i) add(i, i % kLanes);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums.along += static_cast<double>(along[lane]);
      sums.squares += static_cast<double>(squares[lane]);
    }
  }
  return sums;
}

/// Returns the tensor as a contiguous row of real numbers. Calls no operator if it already is
/// contiguous and real.
torch::Tensor flattened(const torch::Tensor& tensor) {
  if (tensor.is_contiguous() && !tensor.is_complex() && !tensor.is_neg()) {
    torch::Tensor row = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                                 tensor.key_set(), tensor.dtype());
    const std::int64_t size = tensor.numel(), stride = 1;
    row.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(size), at::IntArrayRef(stride),
                                                     tensor.storage_offset());
    return row;
  }
  torch::Tensor values = tensor.detach().resolve_conj().resolve_neg();
  if (values.is_complex()) values = torch::view_as_real(values);
  return values.contiguous().view({-1});
}

std::int64_t hash_of_row(const torch::Tensor& row) {
  return static_cast<std::int64_t>(
      hash_of(static_cast<const std::byte*>(row.const_data_ptr()), row.nbytes()));
}

/// The difference that is allowed, relative to the norm. Every rank applies the same gradients, so
/// without a fault parameters differ only by the roundings of different kinds of processors, which
/// add up over the steps.
double tolerance_of(torch::ScalarType type) {
  if (type == torch::kFloat16) return 1e-2;
  return type == torch::kBFloat16 ? 3e-2 : 3e-5;
}

Sums sums_of(const torch::Tensor& tensor) {
  if (tensor.scalar_type() == torch::kFloat32 && tensor.is_contiguous() && !tensor.is_neg())
    return sums_of(tensor.const_data_ptr<float>(), tensor.numel());
  const torch::Tensor values = flattened(tensor);
  if (values.scalar_type() == torch::kFloat64)
    return sums_of(values.const_data_ptr<double>(), values.numel());
  const torch::Tensor single = values.to(torch::kFloat32);
  return sums_of(single.const_data_ptr<float>(), single.numel());
}

/// Returns the end of the chunk at `begin`: adjacent rows of one dtype with up to kChunk elements,
/// or one larger row.
std::size_t end_of_chunk(std::span<const torch::Tensor> rows, std::size_t begin) {
  std::int64_t elements = rows[begin].numel();
  std::size_t end = begin + 1;
  while (end < rows.size() && rows[end].scalar_type() == rows[begin].scalar_type() &&
         elements + rows[end].numel() <= kChunk)
    elements += rows[end++].numel();
  return end;
}

/// Returns for each row the sum of values times signs, and the sum of squares. The rows fit in a
/// chunk.
std::pair<torch::Tensor, torch::Tensor> chunk_sums(at::TensorList rows) {
  std::vector<std::int64_t> lengths;
  std::int64_t elements = 0;
  for (const torch::Tensor& row : rows) {
    lengths.push_back(row.numel());
    elements += row.numel();
  }
  const auto on_gpu = rows.front().options().dtype(torch::kFloat32);
  const auto period = static_cast<std::int64_t>(kSigns);
  const torch::Tensor sign =
      torch::from_blob(const_cast<float*>(signs().data()), {period}, torch::kFloat32)
          .to(on_gpu.device(), /*non_blocking=*/true);
  // Padded to whole periods of the signs.
  const torch::Tensor all = torch::zeros({(elements + period - 1) / period * period}, on_gpu);
  all.narrow(0, 0, elements).copy_(torch::cat(rows));
  const torch::Tensor count = torch::tensor(lengths, torch::kInt64).to(on_gpu.device(), true);
  const auto sums = [&](const torch::Tensor& values) {
    return torch::segment_reduce(values.view({-1}).narrow(0, 0, elements), "sum", count,
                                 /*indices=*/{}, /*offsets=*/{}, /*axis=*/0, /*unsafe=*/true,
                                 /*initial=*/0);
  };
  return {sums(all.view({-1, period}) * sign), sums(all.square())};
}

/// Projections of a chunk of rows, not rounded yet. A row larger than a chunk is summed in slices.
torch::Tensor projections_of_chunk(at::TensorList rows) {
  torch::Tensor along, squares;
  if (rows.size() > 1 || rows.front().numel() <= kChunk) {
    std::tie(along, squares) = chunk_sums(rows);
  } else {
    for (const torch::Tensor& slice : rows.front().split(kChunk)) {
      const auto [more_along, more_squares] = chunk_sums(slice);
      along = along.defined() ? along + more_along : more_along;
      squares = squares.defined() ? squares + more_squares : more_squares;
    }
  }
  return torch::where(squares == 0, squares, along / squares.sqrt()) /
         tolerance_of(c10::toRealValueType(rows.front().scalar_type()));
}

}  // namespace

std::int64_t fingerprint_of(const torch::Tensor& tensor, Comparison comparison) {
  const torch::NoGradGuard no_grad;
  if (comparison == Comparison::kExact) return hash_of_row(flattened(tensor));
  const Sums sums = sums_of(tensor);
  if (sums.squares == 0) return 0;
  const double projection = sums.along / std::sqrt(sums.squares) /
                            tolerance_of(c10::toRealValueType(tensor.scalar_type()));
  if (!std::isfinite(projection)) return kNotFinite;
  return static_cast<std::int64_t>(
      std::clamp(std::round(projection * kSteps), -kLargestProjection, kLargestProjection));
}

std::vector<std::int64_t> gpu_hashes(std::span<const torch::Tensor> tensors) try {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> rows;
  for (const torch::Tensor& tensor : tensors) rows.push_back(flattened(tensor));
  std::vector<std::int64_t> hashes;
  for (std::size_t begin = 0; begin < rows.size();) {
    const std::size_t end = end_of_chunk(rows, begin);
    const torch::Tensor chunk = torch::cat(at::TensorList(rows.data() + begin, end - begin)).cpu();
    std::int64_t first = 0;
    for (; begin < end; ++begin) {
      hashes.push_back(hash_of_row(chunk.narrow(0, first, rows[begin].numel())));
      first += rows[begin].numel();
    }
  }
  return hashes;
} catch (const c10::OutOfMemoryError&) {
  // Do not throw, because the other ranks wait for the hashes. Copies to the host need no GPU
  // memory.
  std::vector<std::int64_t> hashes;
  for (const torch::Tensor& tensor : tensors)
    hashes.push_back(fingerprint_of(tensor.detach().cpu(), Comparison::kExact));
  return hashes;
}

torch::Tensor gpu_projections(std::span<const torch::Tensor> tensors) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> rows, parts;
  for (const torch::Tensor& tensor : tensors) rows.push_back(flattened(tensor));
  for (std::size_t begin = 0; begin < rows.size();) {
    const std::size_t end = end_of_chunk(rows, begin);
    parts.push_back(projections_of_chunk(at::TensorList(rows.data() + begin, end - begin)));
    begin = end;
  }
  const torch::Tensor projections = torch::cat(parts).to(torch::kFloat64);
  const torch::Tensor rounded =
      (projections * kSteps).round().clamp(-kLargestProjection, kLargestProjection);
  return torch::where(projections.isfinite(), rounded,
                      torch::full({}, static_cast<double>(kNotFinite), rounded.options()))
      .to(torch::kInt64);
}

bool differ(std::int64_t least, std::int64_t largest, Comparison comparison) {
  // Twice the tolerance, so that without a fault not even one of many parameters exceeds the limit.
  constexpr double kTolerances = 2;
  if (comparison == Comparison::kExact) return least != largest;
  if (least == kNotFinite) return largest != kNotFinite;
  return static_cast<double>(largest - least) > kTolerances * kSteps + 2;
}

std::int64_t hash_of(const std::vector<std::string>& lines) {
  std::uint64_t hash = lines.size();
  for (const std::string& line : lines) {
    const auto bytes = std::as_bytes(std::span(line));
    hash = mixed(hash ^ hash_of(bytes.data(), bytes.size()));
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace hvd::libtorch
