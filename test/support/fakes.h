#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "backend/backend.h"

namespace hvd::testing {

/// Peers for a channel whose test has no engine. Thread-safe if `on_ring` is.
class FakePeers final : public Peers {
 public:
  explicit FakePeers(int rank = 0, int size = 8, std::function<void(int)> called = {})
      : on_ring(std::move(called)), rank_(rank), rings_(static_cast<std::size_t>(size)) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(rings_.size()); }
  void ring(int world_rank) noexcept override {
    rings_[static_cast<std::size_t>(world_rank)].fetch_add(1);
    if (on_ring) on_ring(world_rank);
  }
  /// How often the doorbell of this rank has been rung.
  int rung(int world_rank) const { return rings_[static_cast<std::size_t>(world_rank)].load(); }

  std::function<void(int)> on_ring;  ///< called with the rank whose doorbell is rung

 private:
  const int rank_;
  std::vector<std::atomic<int>> rings_;
};

}  // namespace hvd::testing
