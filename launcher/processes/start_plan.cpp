#include "processes/start_plan.h"

#include <map>
#include <string>

#include "system/socket.h"

namespace hvd::launcher {

std::vector<StartOrder> plan_starts(const std::vector<Hello>& hellos) {
  std::vector<StartOrder> orders(hellos.size());
  if (hellos.empty()) return orders;
  std::map<std::string, int> nodes;
  std::map<int, int> crossing;  // ranks by local rank
  for (std::size_t rank = 0; rank < hellos.size(); ++rank) {
    const Hello& hello = hellos[rank];
    orders[rank].node = nodes.emplace(hello.host, static_cast<int>(nodes.size())).first->second;
    orders[rank].cross_rank = crossing[hello.local_rank]++;
  }
  // Note [Where the ranks meet] in supervisor.cpp
  const Hello& first = hellos.front();
  const bool beside_hvdrun = is_loopback(first.peer_address);
  for (std::size_t rank = 0; rank < hellos.size(); ++rank) {
    StartOrder& order = orders[rank];
    if (!beside_hvdrun) order.address = first.peer_address;
    order.master_port = first.master_port;
    order.nodes = static_cast<int>(nodes.size());
    order.cross_size = crossing[hellos[rank].local_rank];
  }
  return orders;
}

}  // namespace hvd::launcher
