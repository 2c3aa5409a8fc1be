#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace hvd::elastic {

/// A 64-bit hash of bytes, equal on all hosts of a job. Detects damage, and no attack.
std::uint64_t hash_of(std::span<const std::byte>) noexcept;

/// A part of a program's state.
struct Item {
  std::string name = {};
  std::string type = {};  ///< with the size, where that is fixed
  /// The present bytes.
  std::function<std::span<const std::byte>()> view = {};
  /// Makes it this many bytes, and returns where they go. @throws hvd::Error if it has a fixed
  /// size
  std::function<std::span<std::byte>(std::size_t bytes)> room = {};
};

/// Copies all items into the buffer, whose memory it reuses.
void save(std::span<const Item>, std::vector<std::byte>& snapshot);
/// The reverse. @throws hvd::Error if the snapshot is not one of these items
void load(std::span<const Item>, std::span<const std::byte> snapshot);
/// Identifies a program by the names and types of its items: a text for users, at most 300 bytes.
std::string layout(std::span<const Item>);

}  // namespace hvd::elastic
