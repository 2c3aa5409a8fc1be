#pragma once

#if __cplusplus < 202002L
#error "hvd needs C++20: compile with -std=c++20, or link hvd::core with CMake, which adds it"
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hvd {

/// @addtogroup adapters
/// @{

/// Element types. The numbers travel on the wire: append only.
enum class DataType : std::uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kBool = 5,
  kFloat16 = 6,
  kBFloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
};
/// The number of element types.
inline constexpr int kDataTypeCount = 10;

/// Reductions. The numbers travel on the wire: append only.
///
/// Average divides by the number of ranks that contribute, and AverageOfSet by the size of the
/// process set, also while a rank has joined; on integers both truncate toward zero. On `kBool` a
/// sum or maximum is a logical or, a product or minimum a logical and, and an average is a
/// UsageError. The bitwise operations are for integers and `kBool` and take no factors; anything
/// else is a UsageError.
enum class ReduceOp : std::uint8_t {
  kAverage = 0,
  kSum = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kAdasum = 5,
  kBitAnd = 6,
  kBitOr = 7,
  kBitXor = 8,
  kAverageOfSet = 9,
};
/// The number of reductions.
inline constexpr int kReduceOpCount = 10;

/// Whether the reduction divides the sum.
constexpr bool is_average(ReduceOp op) noexcept {
  return op == ReduceOp::kAverage || op == ReduceOp::kAverageOfSet;
}

/// Whether the reduction combines elements bit by bit.
constexpr bool is_bitwise(ReduceOp op) noexcept {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

/// Kinds of collective operation. The numbers travel on the wire: append only.
enum class OpKind : std::uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kReducescatter = 3,
  kAlltoall = 4,
  kBarrier = 5,
  kJoin = 6,
  kGather = 7,
  kAddProcessSet = 8,
  kRemoveProcessSet = 9,
  kReduce = 10,
  kScatter = 11,
};
/// The number of kinds.
inline constexpr int kOpKindCount = 12;

/// The 16-bit type to which float32 elements are cast for the transfer. The numbers travel on the
/// wire: append only.
enum class Compression : std::uint8_t { kNone = 0, kFloat16 = 1, kBFloat16 = 2 };
/// The number of compressions.
inline constexpr int kCompressionCount = 3;

/// Where a tensor's memory is.
enum class DeviceType : std::uint8_t { kCpu = 0, kCuda = 1 };

/// A processor's memory: the host's, or one GPU's.
struct Device {
  DeviceType type = DeviceType::kCpu;
  /// CUDA ordinal; 0 for the CPU. It is local to the process and not compared between ranks.
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Bytes of one element.
std::size_t size_of(DataType) noexcept;
/// Lower-case names as they appear in error messages: "float32", "average", "allreduce", "cpu".
std::string_view to_string(DataType) noexcept;
std::string_view to_string(ReduceOp) noexcept;
std::string_view to_string(OpKind) noexcept;
std::string_view to_string(Compression) noexcept;
std::string_view to_string(DeviceType) noexcept;
/// A shape as it appears in error messages: "[128,64]".
std::string shape_to_string(std::span<const std::int64_t> shape);
inline std::string shape_to_string(std::initializer_list<std::int64_t> shape) {
  return shape_to_string(std::span(shape.begin(), shape.size()));
}

/// The sizes of a tensor's dimensions. Stores up to six inline, so that a
/// submission does not allocate memory.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes) : Shape(sizes.begin(), sizes.end()) {}
  Shape(const std::vector<std::int64_t>& sizes) : Shape(sizes.begin(), sizes.end()) {}
  template <std::forward_iterator Iterator>
  Shape(Iterator first, Iterator last) {
    assign(first, last);
  }

  template <std::forward_iterator Iterator>
  void assign(Iterator first, Iterator last) {
    size_ = static_cast<std::size_t>(std::distance(first, last));
    if (size_ > few_.size()) many_.resize(size_);
    std::copy(first, last, data());
  }

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::int64_t* data() noexcept { return size_ > few_.size() ? many_.data() : few_.data(); }
  const std::int64_t* data() const noexcept {
    return size_ > few_.size() ? many_.data() : few_.data();
  }
  std::int64_t& operator[](std::size_t dimension) noexcept { return data()[dimension]; }
  std::int64_t operator[](std::size_t dimension) const noexcept { return data()[dimension]; }
  std::int64_t* begin() noexcept { return data(); }
  std::int64_t* end() noexcept { return data() + size_; }
  const std::int64_t* begin() const noexcept { return data(); }
  const std::int64_t* end() const noexcept { return data() + size_; }
  friend bool operator==(const Shape& a, const Shape& b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::size_t size_ = 0;
  std::array<std::int64_t, 6> few_ = {};
  std::vector<std::int64_t> many_ = {};
};

/// Contiguous memory of `count` elements, row-major. Does not own it.
struct TensorView {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  DataType dtype = DataType::kFloat32;
  Device device = {};
  Shape shape = {};

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

/// @}

}  // namespace hvd
