#pragma once

#include <cstdint>

namespace hvd::testing {

/// How often this process has called UCX, which hvd opens when it runs: a program that links this
/// has a dlsym() of its own, which gives out functions that count and go on. Zeros in a build
/// without UCX. The numbers only grow; any thread may look.
struct UcxCalls {
  std::uint64_t all = 0;
  std::uint64_t looks = 0;  ///< ucp_worker_progress
  /// Messages that were sent, by the last bits of their tags (transport/carrier.h).
  std::uint64_t control_messages = 0;
  std::uint64_t data_messages = 0;
};
UcxCalls ucx_calls() noexcept;

}  // namespace hvd::testing
