#pragma once

#include <functional>
#include <utility>

#include "backend/backend.h"

namespace hvd::testing {

/// Peers for a channel whose test has no engine. Thread-safe if `on_ring` is.
class FakePeers final : public Peers {
 public:
  explicit FakePeers(
      int rank = 0, int size = 8, std::function<void(int)> called = [](int) {})
      : on_ring(std::move(called)), rank_(rank), size_(size) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void ring(int world_rank) noexcept override { on_ring(world_rank); }

  std::function<void(int)> on_ring;  ///< called with the rank whose doorbell is rung

 private:
  const int rank_;
  const int size_;
};

}  // namespace hvd::testing
