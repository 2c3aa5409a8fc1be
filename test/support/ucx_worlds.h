#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/self/self_backend.h"
#include "base/clock.h"
#include "mpi/support/hosts.h"
#include "support/join_nodes.h"
#include "support/local_job.h"
#include "transport/control_plane.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::testing {

/// For LocalJobOptions::world: ranks of this process that send control and data messages over the
/// carrier of UCX, and share memory like processes of one host.
/// @param workers of each rank: of the real UCX or of a simulated one
/// @param hosts per rank; empty: all on one
/// @param time_to_connect see message::ControlPlaneOptions
inline std::function<RankWorld(int rank)> worlds_over_ucx(
    std::vector<ucx::Workers> workers, const std::vector<std::string>& hosts,
    Duration time_to_connect = std::chrono::milliseconds(500)) {
  const auto size = static_cast<int>(workers.size());
  ucx::JobMembers members{.generation = 9};
  for (const ucx::Workers& own : workers) members.addresses.push_back(own.address());
  std::vector<std::shared_ptr<host::Node>> nodes;
  if (hosts.empty()) {
    nodes = join_nodes(size);
  } else {
    const PretendHosts pretend(hosts);
    nodes = join_nodes(size);
  }
  const bool several = std::set<std::string>(hosts.begin(), hosts.end()).size() > 1;
  const auto all = std::make_shared<std::vector<ucx::Workers>>(std::move(workers));
  return [=](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    ucx::JobMembers own = members;
    own.rank = rank;
    const auto carrier = ucx::make_ucx_carrier(std::move((*all)[index]), std::move(own));
    RankWorld world{.plane = message::make_control_plane(carrier, nodes[index],
                                                         {.time_to_connect = time_to_connect})};
    world.backends.push_back(std::make_shared<flat::FlatBackend>(carrier));
    if (several) {
      world.backends.push_back(
          std::make_shared<hierarchical::HierarchicalBackend>(carrier, nodes[index]));
    }
    // For process sets of one rank.
    world.backends.push_back(std::make_shared<SelfBackend>());
    return world;
  };
}

}  // namespace hvd::testing
