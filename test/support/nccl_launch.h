#pragma once

#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>

#include "backend/nccl/launcher.h"

namespace hvd::testing {

/// Whether a separate thread calls NCCL in this run of a test (HVD_TEST_NCCL_LAUNCH=thread), as in
/// hvd by default. Otherwise the test itself calls it, always in the same order.
inline bool nccl_launches_on_thread() {
  const char* const value = std::getenv("HVD_TEST_NCCL_LAUNCH");
  return value != nullptr && std::string_view(value) == "thread";
}

inline std::shared_ptr<nccl::Library> with_launch_of_test(std::shared_ptr<nccl::Library> library,
                                                          std::shared_ptr<device::Context> device) {
  if (!nccl_launches_on_thread()) return library;
  return nccl::make_launcher(std::move(library), std::move(device));
}

}  // namespace hvd::testing
