#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/text.h"
#include "hvd/c/hvd.h"
#include "hvd/error.h"

/// Structs that programs built against another version of the header may pass. They only grow, so
/// the size identifies the version.
namespace hvd::capi {

/// The size of each struct in its first version. A constant: it must not follow sizeof.
template <class T>
inline constexpr std::size_t kFirstSize = 0;
template <>
inline constexpr std::size_t kFirstSize<hvd_options_t> = 64;
template <>
inline constexpr std::size_t kFirstSize<hvd_submission_t> = 120;
template <>
inline constexpr std::size_t kFirstSize<hvd_message_t> = 56;
template <>
inline constexpr std::size_t kFirstSize<hvd_result_t> = 48;
template <>
inline constexpr std::size_t kFirstSize<hvd_metrics_t> = 104;

// A larger size must be uninitialised memory.
inline constexpr std::size_t kLargestStruct = 4096;

/// @throws UsageError for a size that no version has. `name` is the struct's, as "hvd_options_t".
template <class T>
std::size_t checked_size(const T& given, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && std::is_standard_layout_v<T> &&
                offsetof(T, struct_size) == 0);
  static_assert(sizeof(T) >= kFirstSize<T> && kFirstSize<T> > 0);
  const std::size_t size = given.struct_size;
  if (size < kFirstSize<T> || size > kLargestStruct) {
    throw UsageError(text(name, ": struct_size is ", size, ", expected at least ", kFirstSize<T>,
                          "; initialise the struct with its ..._INIT macro"));
  }
  return size;
}

/// Returns a copy of the struct in the version of this library.
/// @throws UsageError as checked_size(), and when a field that this library does not have is not
/// zero.
template <class T>
T read_versioned(const T& given, const char* name) {
  const std::size_t size = checked_size(given, name);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw UsageError(text(name, ": byte ", i, " of ", size, " is set, and this library knows ",
                          sizeof(T), "; the program uses a field of a newer hvd"));
  }
  T copy{};
  std::memcpy(&copy, &given, std::min(size, sizeof(T)));
  return copy;
}

/// Fills in a struct of the caller's version. Fields that this library does not have become zero.
/// @throws UsageError as checked_size().
template <class T>
void write_versioned(T& target, T value, const char* name) {
  const std::size_t size = checked_size(target, name);
  value.struct_size = std::min(size, sizeof(T));
  auto* const bytes = reinterpret_cast<unsigned char*>(&target);
  std::memcpy(bytes, &value, value.struct_size);
  std::fill(bytes + value.struct_size, bytes + size, static_cast<unsigned char>(0));
}

}  // namespace hvd::capi
