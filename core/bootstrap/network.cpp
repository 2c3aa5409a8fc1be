#include "bootstrap/network.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <string_view>

#include "base/interface.h"
#include "bootstrap/connection.h"

namespace hvd::rendezvous {
namespace {

constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kHvdrun = "hvdrun://";
/// The interface is only a preference, so a slow name service must not delay the start for long.
constexpr auto kResolveTimeout = std::chrono::seconds(2);

/// The host that the place names: one that ranks of other hosts can reach, or another host of the
/// job. Without brackets; empty if the place names no host.
std::string host_in(std::string_view place) {
  if (place.starts_with(kHvdrun)) {
    // hvdrun's own host reaches rank 0 by loopback, so the agent names another host.
    for (const char* const name : {"HVD_LAUNCHER_PEER", "MASTER_ADDR"})
      if (const char* const host = std::getenv(name)) return host;
    return {};
  }
  if (!place.starts_with(kTcp)) return {};
  place.remove_prefix(kTcp.size());
  place = place.substr(0, place.rfind(':'));
  if (place.starts_with('[') && place.ends_with(']')) place = place.substr(1, place.size() - 2);
  return std::string(place);
}

}  // namespace

std::string interface_to(const std::string& place, Deadline deadline) {
  const std::string host = host_in(place);
  if (host.empty()) return {};
  auto resolved = resolve(host, 9);  // any port, because nothing is sent
  const auto until =
      std::min<Deadline>(deadline, std::chrono::steady_clock::now() + kResolveTimeout);
  if (resolved.wait_until(until) != std::future_status::ready) return {};
  for (const sockaddr_storage& address : resolved.get().addresses) {
    std::string interface = interface_of(local_address_towards(address));
    if (!interface.empty()) return interface;
  }
  return {};
}

}  // namespace hvd::rendezvous
