#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "negotiation/codec.h"

namespace hvd::launcher {

/// The largest message on a worker's member socket.
inline constexpr std::size_t kMaxMemberBytes = std::size_t{16} << 20;

/// A message with its length before it: 4 bytes, little-endian.
std::string frame_member_message(std::span<const std::byte> message);

/// Cuts the stream of a worker's member socket into messages. Not thread-safe.
class MemberStream {
 public:
  void feed(std::string_view bytes) { buffer_ += bytes; }
  /// The next whole message; valid until the next call of any function.
  /// @throws wire::WireError for a length of 0 or above kMaxMemberBytes
  std::optional<std::span<const std::byte>> next();

 private:
  std::string buffer_;
  std::size_t consumed_ = 0;
};

}  // namespace hvd::launcher
