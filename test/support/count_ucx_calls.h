#pragma once

#include <cstdint>

namespace hvd::testing {

/// How often this process has called UCX. A program that links this file gets a dlsym() that
/// returns functions which count the call and forward it. Zeros in a build without UCX. The numbers
/// only grow; any thread may read them.
struct UcxCalls {
  std::uint64_t all = 0;
  std::uint64_t polls = 0;  ///< ucp_worker_progress
  /// Messages that were sent, by the last bits of their tags (transport/carrier.h).
  std::uint64_t control_messages = 0;
  std::uint64_t data_messages = 0;
};
UcxCalls ucx_calls() noexcept;

}  // namespace hvd::testing
