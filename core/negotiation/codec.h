#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/error.h"

namespace hvd::wire {

using Bytes = std::vector<std::byte>;

/// A message that cannot be understood: truncated, oversized, of another version, or out of range.
class WireError : public Error {
 public:
  using Error::Error;
};

/// Appends little-endian values. Integers of unbounded size are LEB128 varints, signed ones
/// zigzag-coded.
class Writer {
 public:
  void u8(std::uint8_t value) { bytes_.push_back(std::byte{value}); }
  void varint(std::uint64_t value);
  void zigzag(std::int64_t value);
  void f64(double value);
  void text(std::string_view value);
  void raw(std::span<const std::byte> value) {
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }

  Bytes take() && { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

/// Reads the output of Writer. Every function checks bounds and throws a WireError that names
/// `field` and the offset.
class Reader {
 public:
  /// @param known see skip_known()
  explicit Reader(std::span<const std::byte> bytes, std::span<const std::byte> known = {})
      : bytes_(bytes), known_(known) {}

  std::uint8_t u8(const char* field);
  /// Reads a number of at most `highest`.
  std::uint64_t varint(const char* field, std::uint64_t highest);
  std::int64_t zigzag(const char* field);
  double f64(const char* field);
  std::string text(const char* field, std::size_t longest);
  std::span<const std::byte> raw(const char* field, std::size_t size);
  /// An element count: at most `highest`, and no more than the bytes that are left, so that a
  /// forged count cannot cause a large allocation.
  std::size_t count(const char* field, std::size_t highest);

  /// Skips the known bytes if there are any and they come next. @return whether it has done so
  bool skip_known() noexcept;

  std::size_t remaining() const noexcept { return bytes_.size() - offset_; }
  void expect_end() const;
  [[noreturn]] void fail(const char* field, const std::string& what) const;

 private:
  std::span<const std::byte> bytes_;
  std::span<const std::byte> known_;
  std::size_t offset_ = 0;
};

struct Report;
struct Request;
enum class MessageKind : std::uint8_t;

// Parts that several kinds of message share, for the other files of the codec.

inline constexpr std::uint64_t kAnyNumber = std::numeric_limits<std::uint64_t>::max();
inline constexpr std::uint64_t kMaxInt = std::numeric_limits<int>::max();

/// Begins a message with its header.
Writer start(MessageKind);
void write_request(Writer&, const Request&);
Request read_request(Reader&);
Report read_report(Reader&);

}  // namespace hvd::wire
