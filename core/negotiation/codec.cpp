#include "negotiation/codec.h"
#include "base/text.h"

#include <bit>
#include <cstring>

namespace hvd::wire {

void Writer::varint(std::uint64_t value) {
  while (value >= 0x80) {
    u8(static_cast<std::uint8_t>(value | 0x80));
    value >>= 7;
  }
  u8(static_cast<std::uint8_t>(value));
}

void Writer::zigzag(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  varint((bits << 1) ^ (value < 0 ? ~std::uint64_t{0} : 0));
}

void Writer::f64(double value) {
  auto bits = std::bit_cast<std::uint64_t>(value);
  for (int i = 0; i < 8; ++i, bits >>= 8) u8(static_cast<std::uint8_t>(bits));
}

void Writer::text(std::string_view value) {
  varint(value.size());
  raw(std::as_bytes(std::span(value.data(), value.size())));
}

void Reader::fail(const char* field, const std::string& what) const {
  throw WireError(hvd::text("control message: ", field, " at byte ", offset_, " of ", bytes_.size(),
                            ": ", what));
}

std::uint8_t Reader::u8(const char* field) {
  if (remaining() < 1) fail(field, "the message ends early");
  return std::to_integer<std::uint8_t>(bytes_[offset_++]);
}

std::uint64_t Reader::varint(const char* field, std::uint64_t highest) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const std::uint8_t byte = u8(field);
    const std::uint64_t part = byte & 0x7F;
    if (shift == 63 && part > 1) fail(field, "a number of more than 64 bits");
    value |= part << shift;
    if ((byte & 0x80) == 0) {
      if (value > highest) fail(field, hvd::text("expected at most ", highest, ", got ", value));
      return value;
    }
  }
  fail(field, "a number of more than 64 bits");
}

std::int64_t Reader::zigzag(const char* field) {
  const std::uint64_t bits = varint(field, ~std::uint64_t{0});
  return static_cast<std::int64_t>((bits >> 1) ^ (~(bits & 1) + 1));
}

double Reader::f64(const char* field) {
  std::uint64_t bits = 0;
  const auto part = raw(field, 8);
  for (int i = 7; i >= 0; --i)
    bits = (bits << 8) | std::to_integer<std::uint64_t>(part[static_cast<std::size_t>(i)]);
  return std::bit_cast<double>(bits);
}

std::string Reader::text(const char* field, std::size_t longest) {
  const std::size_t size = count(field, longest);
  const auto part = raw(field, size);
  return std::string(reinterpret_cast<const char*>(part.data()), part.size());
}

bool Reader::skip_known() noexcept {
  const auto next = bytes_.subspan(offset_);
  if (known_.empty() || next.size() < known_.size() ||
      !std::equal(known_.begin(), known_.end(), next.begin()))
    return false;
  offset_ += known_.size();
  return true;
}

std::span<const std::byte> Reader::raw(const char* field, std::size_t size) {
  if (remaining() < size) fail(field, "the message ends early");
  const auto part = bytes_.subspan(offset_, size);
  offset_ += size;
  return part;
}

std::size_t Reader::count(const char* field, std::size_t highest) {
  const auto value = static_cast<std::size_t>(varint(field, highest));
  if (value > remaining()) {
    fail(field, hvd::text(value, " elements announced, ", remaining(), " bytes left"));
  }
  return value;
}

void Reader::expect_end() const {
  if (remaining() != 0) fail("end", hvd::text(remaining(), " bytes too many"));
}

}  // namespace hvd::wire
