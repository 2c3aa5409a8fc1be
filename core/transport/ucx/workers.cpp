#include "transport/ucx/workers.h"

#include <cstdint>
#include <cstring>

#include "hvd/error.h"

namespace hvd::ucx {

// Each part is its size in four bytes, and itself. Ranks of one job have one build, which is
// checked before they get here.
std::vector<std::byte> Workers::address() const {
  std::vector<std::byte> whole;
  for (const auto& worker : of) {
    const std::vector<std::byte> part = worker->address();
    const auto bytes = static_cast<std::uint32_t>(part.size());
    const auto* const first = reinterpret_cast<const std::byte*>(&bytes);
    whole.insert(whole.end(), first, first + sizeof bytes);
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

std::span<const std::byte> part_of(std::span<const std::byte> whole, Side side) {
  for (std::size_t before = static_cast<std::size_t>(side);; --before) {
    std::uint32_t bytes = 0;
    if (whole.size() < sizeof bytes) break;
    std::memcpy(&bytes, whole.data(), sizeof bytes);
    whole = whole.subspan(sizeof bytes);
    if (whole.size() < bytes) break;
    if (before == 0) return whole.first(bytes);
    whole = whole.subspan(bytes);
  }
  throw Error(
      "ucx: a rank's address is too short; do all ranks run the same build with the same "
      "settings?");
}

}  // namespace hvd::ucx
