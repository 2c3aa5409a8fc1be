#include "elastic/peer_address.h"

#include <unistd.h>

#include <algorithm>

#include "base/expect.h"
#include "base/interface.h"
#include "base/process_watch.h"
#include "base/text.h"

namespace hvd::elastic {
namespace {

constexpr std::size_t kMaxBytes = 2000;

/// The network namespace, which limits the reach of loopback.
std::string network_namespace() {
  char target[64] = {};
  const ssize_t bytes = ::readlink("/proc/self/ns/net", target, sizeof target);
  return bytes > 0 ? std::string(target, static_cast<std::size_t>(bytes)) : std::string();
}

}  // namespace

PeerAddress own_address(std::uint16_t port) {
  PeerAddress own{.host = text(boot_id(), "/", network_namespace()), .port = port};
  for (const InterfaceAddress& found : interface_addresses())
    if (!found.link_local) own.addresses.push_back(found.address);
  return own;
}

// HOST PORT ADDRESS..., separated by spaces; none of them contains a space.
std::string encode(const PeerAddress& address) {
  std::string encoded = text(address.host.empty() ? "?" : address.host, " ", address.port);
  for (const std::string& one : address.addresses)
    if (encoded.size() + 1 + one.size() <= kMaxBytes) encoded += " " + one;
  return encoded;
}

std::optional<PeerAddress> decode_peer_address(const std::string& encoded) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= encoded.size();) {
    const std::size_t end = std::min(encoded.find(' ', begin), encoded.size());
    words.push_back(encoded.substr(begin, end - begin));
    begin = end + 1;
  }
  if (words.size() < 2 ||
      std::any_of(words.begin(), words.end(), [](const std::string& word) { return word.empty(); }))
    return std::nullopt;
  const auto port = parse_number<std::uint16_t>(words[1]);
  if (!port || *port == 0) return std::nullopt;
  return PeerAddress{
      .host = words[0], .port = *port, .addresses = {words.begin() + 2, words.end()}};
}

std::vector<std::string> addresses_of_rank_0(std::span<const PeerAddress> ranks) {
  HVD_EXPECT(!ranks.empty(), "there is a rank");
  const PeerAddress& first = ranks.front();
  const bool one_host = std::all_of(
      ranks.begin(), ranks.end(), [&](const PeerAddress& rank) { return rank.host == first.host; });
  // A host without a network has only loopback, which no other host reaches.
  if (one_host || first.addresses.empty()) return {"127.0.0.1"};
  return first.addresses;
}

}  // namespace hvd::elastic
