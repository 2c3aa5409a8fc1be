#pragma once

#include <atomic>
#include <cstdint>

#include "hvd/hvd.h"

namespace hvd::observe {

/// A number that one thread at a time adds to: the one that drives the engine. Any thread reads it.
class Counter {
 public:
  void add(std::uint64_t amount) noexcept { store(load() + amount); }
  void store(std::uint64_t value) noexcept { value_.store(value, std::memory_order_relaxed); }
  std::uint64_t load() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// The live counters behind hvd::Metrics.
struct Counters {
  Counter control_messages_sent;
  Counter control_messages_received;
  Counter control_bytes_sent;
  Counter negotiated_operations;
  Counter cached_operations;
  Counter locked_operations;
  Counter completed_operations;
  Counter failed_operations;
  Counter backend_calls;
  Counter bytes;
  Counter stalls;
  Counter plans_applied;

  Metrics snapshot() const;
};

}  // namespace hvd::observe
