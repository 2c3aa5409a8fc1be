#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/shared_arena.h"
#include "bootstrap/init_method.h"
#include "engine/runtime_options.h"
#include "transport/carrier.h"
#include "transport/node/node.h"

namespace hvd::runtime {

/// The values that HVD_BACKEND accepts. A job has either "mpi" or "ucx".
std::vector<std::string_view> backend_names();

/// Checks HVD_BACKEND. Call it before joining the job, because a rank that left right after joining
/// would keep the others waiting.
/// @throws UsageError for an unknown name, and for a carrier that this job does not use
void check_backend_name(const RuntimeOptions&, const InitMethod&);

/// The backends for the host's memory in a job of several ranks. The same on every rank of a host.
std::vector<std::shared_ptr<Backend>> make_host_backends(const std::shared_ptr<message::Carrier>&,
                                                         const std::shared_ptr<host::Node>&,
                                                         std::shared_ptr<const SharedArena>);

struct Component {
  const char* name;
  bool built;
  std::string detail;  ///< a version, or why it was left out
};
/// All optional components, for build_info() and `hvdrun --check-build`.
std::vector<Component> optional_components();

}  // namespace hvd::runtime
