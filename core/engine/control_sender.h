#pragma once

#include <span>

#include "negotiation/messages.h"
#include "observe/counters.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// Sends control messages and counts them. A pair of references: every part of an engine that sends
/// has its own.
///
/// Not thread-safe: the thread that drives the engine. What the control plane throws goes through.
class ControlSender {
 public:
  ControlSender(control::ControlPlane& control, observe::Counters& counters) noexcept
      : control_(control), counters_(counters) {}

  void send(int rank, const wire::Bytes& bytes) const {
    count(1, bytes.size());
    control_.send(rank, bytes);
  }
  /// @param ranks others than this one
  void send(std::span<const int> ranks, const wire::Bytes& bytes) const {
    count(ranks.size(), bytes.size());
    control_.send(ranks, bytes);
  }

 private:
  void count(std::size_t messages, std::size_t bytes) const noexcept {
    counters_.control_messages_sent.fetch_add(messages, std::memory_order_relaxed);
    counters_.control_bytes_sent.fetch_add(messages * bytes, std::memory_order_relaxed);
  }

  control::ControlPlane& control_;
  observe::Counters& counters_;
};

}  // namespace hvd::runtime
