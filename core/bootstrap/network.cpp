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

/// The host in the URL: one that ranks of other hosts can reach, or another host of the
/// job. Without brackets; empty if the URL has no host.
std::string host_in(std::string_view url) {
  if (url.starts_with(kHvdrun)) {
    // hvdrun's own host reaches rank 0 by loopback, so the agent names another host.
    for (const char* const name : {"HVD_LAUNCHER_PEER", "MASTER_ADDR"})
      if (const char* const host = std::getenv(name)) return host;
    return {};
  }
  if (!url.starts_with(kTcp)) return {};
  url.remove_prefix(kTcp.size());
  url = url.substr(0, url.rfind(':'));
  if (url.starts_with('[') && url.ends_with(']')) url = url.substr(1, url.size() - 2);
  return std::string(url);
}

}  // namespace

std::string interface_to(const std::string& url, Deadline deadline) {
  const std::string host = host_in(url);
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
