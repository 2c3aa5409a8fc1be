#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "transport/ucx/worker.h"

namespace hvd::ucx {

/// Which of a rank's workers: one for each plane and direction. See Note [Connections go one way].
enum class Side : std::uint8_t { kControlIn, kControlOut, kDataIn, kDataOut };
inline constexpr std::size_t kSides = 4;

/// The workers of a rank.
struct Workers {
  std::unique_ptr<Worker> of[kSides] = {};  ///< by Side
  /// The memory of a message is touched by the worker's functions only, and by no peer and no
  /// hardware.
  bool touch_nothing_by_themselves = false;

  /// What the other ranks need of this one: some hundred bytes. @throws hvd::Error
  std::vector<std::byte> address() const;
};

/// The part of a Workers::address() that belongs to one of them.
/// @throws hvd::Error when `whole` is none
std::span<const std::byte> part_of(std::span<const std::byte> whole, Side);

}  // namespace hvd::ucx
