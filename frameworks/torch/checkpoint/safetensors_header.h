#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::libtorch {

/// The element types that LibTorch and the safetensors format share, in the order of the format.
enum class SafetensorsType {
  kBool,
  kF4,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// The type's name in a header, such as "F32".
std::string_view to_string(SafetensorsType type) noexcept;

/// One tensor of a header.
struct SafetensorsEntry {
  std::string name;
  SafetensorsType type = SafetensorsType::kF32;
  std::vector<std::uint64_t> shape;  ///< in elements of `type`; an F4 has 4 bits
  /// The tensor's first byte, and the one behind its last byte, counted from the end of the header.
  std::uint64_t begin = 0, end = 0;
};

/// The header of a safetensors file: a length in 8 bytes, least significant first, and that many
/// bytes of JSON. The bytes of all tensors follow without gaps.
/// https://github.com/huggingface/safetensors#format
struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> tensors;  ///< in the order of their bytes
  std::uint64_t bytes = 0;                ///< of the length and the JSON together

  /// Puts the tensors in the order of the Python package (types of the largest alignment first,
  /// then by name), gives them their offsets, and returns the bytes of the header, padded with
  /// blanks to a multiple of 8. The same tensors give the same bytes as with that package.
  /// @throws UsageError for a name or metadata that is not UTF-8, for a name that occurs twice or
  /// is "__metadata__", and for a header that is longer than kMaxBytes
  std::string encode();

  /// Reads the header at the beginning of a complete file, and checks it against the file's size.
  /// Touches no other bytes of the file.
  /// @param where the file's name in error texts
  /// @throws SafetensorsError for every header that the format does not allow: a length beyond the
  /// file or kMaxBytes, text that is not JSON or not UTF-8, a member that is missing or of a wrong
  /// type, a name that occurs twice, an unknown dtype, a size that does not fit shape and dtype,
  /// tensors that overlap, and bytes of the file that belong to no tensor
  static SafetensorsHeader decode(std::string_view file, const std::string& where);

  static constexpr std::uint64_t kMaxBytes = 100'000'000;  ///< of the JSON, as in the format
  static constexpr std::size_t kMaxDims = 64;              ///< of a tensor, as in LibTorch
};

/// A name from a file for an error text: quoted, without control characters, and cut if it is long.
std::string printable(std::string_view name);

}  // namespace hvd::libtorch
