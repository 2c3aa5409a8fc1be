#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/shared_arena.h"

namespace hvd::shm {

/// This rank's arena and those of its peers, each mapped once however many channels use it. Used by
/// the thread that drives the engine.
class PeerArenas {
 public:
  /// @param own may be null
  explicit PeerArenas(std::shared_ptr<const SharedArena> own) : own_(std::move(own)) {}

  ArenaAddress own_address() const noexcept { return own_ ? own_->address() : ArenaAddress{}; }
  /// Where in this rank's arena all of this lies; -1 when it does not.
  std::int64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
    const auto offset = own_ ? own_->offset_of(memory, bytes) : std::nullopt;
    return offset ? static_cast<std::int64_t>(*offset) : -1;
  }
  /// Null when it cannot be mapped.
  std::shared_ptr<const PeerArena> map(const ArenaAddress& address) {
    std::weak_ptr<const PeerArena>& known = mapped_[address.identity];
    std::shared_ptr<const PeerArena> arena = known.lock();
    if (!arena) known = arena = PeerArena::map(address);
    return arena;
  }

 private:
  const std::shared_ptr<const SharedArena> own_;
  std::map<std::uint64_t, std::weak_ptr<const PeerArena>> mapped_;  // by identity
};

}  // namespace hvd::shm
