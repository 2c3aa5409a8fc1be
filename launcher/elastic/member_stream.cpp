#include "elastic/member_stream.h"

#include <cstdint>

#include "base/text.h"

namespace hvd::launcher {
namespace {

constexpr std::size_t kLengthBytes = 4;

}  // namespace

std::string frame_member_message(std::span<const std::byte> message) {
  std::string bytes;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    bytes += static_cast<char>((message.size() >> (8 * i)) & 0xff);
  return bytes.append(reinterpret_cast<const char*>(message.data()), message.size());
}

std::optional<std::span<const std::byte>> MemberStream::next() {
  buffer_.erase(0, consumed_);
  consumed_ = 0;
  if (buffer_.size() < kLengthBytes) return std::nullopt;
  std::size_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= static_cast<std::size_t>(static_cast<std::uint8_t>(buffer_[i])) << (8 * i);
  if (length == 0 || length > kMaxMemberBytes) {
    throw wire::WireError(
        text("expected a message of 1 to ", kMaxMemberBytes, " bytes, got ", length));
  }
  if (buffer_.size() < kLengthBytes + length) return std::nullopt;
  consumed_ = kLengthBytes + length;
  return std::as_bytes(std::span(buffer_)).subspan(kLengthBytes, length);
}

}  // namespace hvd::launcher
