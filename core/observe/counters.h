#pragma once

#include <atomic>
#include <cstdint>

#include "hvd/hvd.h"

namespace hvd::observe {

/// The live counters behind hvd::Metrics. Written mostly by the thread that drives the engine, read
/// by any.
struct Counters {
  std::atomic<std::uint64_t> control_messages_sent{0};
  std::atomic<std::uint64_t> control_messages_received{0};
  std::atomic<std::uint64_t> control_bytes_sent{0};
  std::atomic<std::uint64_t> negotiated_operations{0};
  std::atomic<std::uint64_t> cached_operations{0};
  std::atomic<std::uint64_t> locked_operations{0};
  std::atomic<std::uint64_t> completed_operations{0};
  std::atomic<std::uint64_t> failed_operations{0};
  std::atomic<std::uint64_t> backend_calls{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> stalls{0};
  std::atomic<std::uint64_t> plans_applied{0};

  Metrics snapshot() const;
};

}  // namespace hvd::observe
