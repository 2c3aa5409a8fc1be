#include "bootstrap/rendezvous.h"

#include <charconv>
#include <cstdint>
#include <utility>

#include "bootstrap/file_rendezvous.h"
#include "bootstrap/hvdrun_rendezvous.h"
#include "bootstrap/tcp_rendezvous.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

constexpr std::string_view kFile = "file://";
constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kHvdrun = "hvdrun://";

/// A name or an address, where that of IPv6 may stand in brackets.
bool is_host(std::string_view text) {
  const bool opens = text.starts_with('[');
  if (opens != text.ends_with(']')) return false;
  if (opens) text = text.substr(1, text.size() - 2);
  return !text.empty() && text.find_first_of("[]/ ") == std::string_view::npos;
}

std::optional<std::uint16_t> port_in(const std::string& text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port == 0) return std::nullopt;
  return port;
}

}  // namespace

void check(const Introduction& own) {
  constexpr int kMostRanks = 1'000'000;
  constexpr std::size_t kMostText = 4096;
  if (own.size > kMostRanks) {
    throw UsageError("hvd::init: expected a world size of at most " + std::to_string(kMostRanks) +
                     ", got " + std::to_string(own.size) + " on rank " + std::to_string(own.rank));
  }
  for (const auto& [name, text] : {std::pair("HVD_JOB_NAME", std::string_view(own.job)),
                                   std::pair("HVD_JOB_TOKEN", std::string_view(own.token))}) {
    if (text.size() <= kMostText) continue;
    throw UsageError("hvd::init: " + std::string(name) + ": expected at most " +
                     std::to_string(kMostText) + " bytes, got " + std::to_string(text.size()) +
                     " on rank " + std::to_string(own.rank));
  }
  if (own.size >= 1 && own.rank >= 0 && own.rank < own.size) return;
  throw UsageError("hvd::init: expected a rank from 0 to " + std::to_string(own.size - 1) +
                   " (the world size is " + std::to_string(own.size) + "), got " +
                   std::to_string(own.rank));
}

std::unique_ptr<Rendezvous> meet(const std::string& init_method, const Introduction& own,
                                 Deadline deadline) {
  check(own);
  if (init_method.starts_with(kFile)) {
    const std::string path = init_method.substr(kFile.size());
    if (path.size() < 2 || path.front() != '/' || path.back() == '/') {
      throw UsageError("hvd::init: init_method '" + init_method +
                       "': expected the absolute path of a file, as in file:///shared/job");
    }
    return meet_in_file(path, own, deadline);
  }
  if (init_method.starts_with(kTcp)) {
    const std::string address = init_method.substr(kTcp.size());
    const auto colon = address.rfind(':');
    const auto port =
        colon == std::string::npos ? std::nullopt : port_in(address.substr(colon + 1));
    if (port && is_host(std::string_view(address).substr(0, colon)))
      return meet_at_port(address.substr(0, colon), *port, own, deadline);
    throw UsageError("hvd::init: init_method '" + init_method +
                     "': expected tcp://HOST:PORT with a port from 1 to 65535, where an address of "
                     "IPv6 stands in brackets, or file:///path");
  }
  if (init_method.starts_with(kHvdrun))
    return meet_through_hvdrun(init_method.substr(kHvdrun.size()), own, deadline);
  throw UsageError("hvd::init: init_method '" + init_method +
                   "': expected tcp://HOST:PORT, which rank 0 serves, or file:///path of a file "
                   "that all ranks share");
}

void Rendezvous::throw_absent(std::string_view what, int rank) const {
  throw PeerLostError("hvd::init: rank " + std::to_string(rank) + " came to " + place() +
                          " and has said nothing of its " + std::string(what) +
                          " in time; see whether it has ended",
                      rank);
}

std::vector<Bytes> Rendezvous::exchange(std::string_view what, std::span<const std::byte> mine,
                                        Deadline deadline) {
  const auto key = [what](int rank) { return std::string(what) + "/" + std::to_string(rank); };
  put(key(rank()), mine);
  std::vector<Bytes> all;
  for (int other = 0; other < size(); ++other) {
    auto value = wait(key(other), other, deadline);
    if (!value) throw_absent(what, other);
    all.push_back(std::move(*value));
  }
  return all;
}

}  // namespace hvd::rendezvous
