#include "bootstrap/rendezvous.h"

#include <cstdint>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

constexpr std::string_view kFile = "file://";
constexpr std::string_view kTcp = "tcp://";
constexpr std::string_view kHvdrun = "hvdrun://";

/// Whether the text is a host name or an address; an IPv6 address may be in brackets.
bool is_host(std::string_view text) {
  const bool opens = text.starts_with('[');
  if (opens != text.ends_with(']')) return false;
  if (opens) text = text.substr(1, text.size() - 2);
  return !text.empty() && text.find_first_of("[]/ ") == std::string_view::npos;
}

std::optional<std::uint16_t> port_in(std::string_view digits) {
  const auto port = parse_number<std::uint16_t>(digits);
  return port && *port != 0 ? port : std::nullopt;
}

}  // namespace

void check(const RankInfo& own) {
  constexpr int kMostRanks = 1'000'000;
  constexpr std::size_t kMostText = 4096;
  if (own.size > kMostRanks) {
    throw UsageError(text("hvd::init: expected a world size of at most ", kMostRanks, ", got ",
                          own.size, " on rank ", own.rank));
  }
  for (const auto& [name, value] : {std::pair("HVD_JOB_NAME", std::string_view(own.job)),
                                    std::pair("HVD_JOB_TOKEN", std::string_view(own.token))}) {
    if (value.size() <= kMostText) continue;
    throw UsageError(text("hvd::init: ", name, ": expected at most ", kMostText, " bytes, got ",
                          value.size(), " on rank ", own.rank));
  }
  if (own.size >= 1 && own.rank >= 0 && own.rank < own.size) return;
  throw UsageError(text("hvd::init: expected a rank from 0 to ", own.size - 1,
                        " (the world size is ", own.size, "), got ", own.rank));
}

std::unique_ptr<Rendezvous> join(const std::string& init_method, const RankInfo& own,
                                 Deadline deadline) {
  check(own);
  if (init_method.starts_with(kFile)) {
    const std::string path = init_method.substr(kFile.size());
    if (path.size() < 2 || path.front() != '/' || path.back() == '/') {
      throw UsageError(text("hvd::init: init_method '", init_method,
                            "': expected the absolute path of a file, as in file:///shared/job"));
    }
    return join_in_file(path, own, deadline);
  }
  if (init_method.starts_with(kTcp)) {
    const std::string address = init_method.substr(kTcp.size());
    const auto colon = address.rfind(':');
    const auto port =
        colon == std::string::npos ? std::nullopt : port_in(address.substr(colon + 1));
    if (port && is_host(std::string_view(address).substr(0, colon)))
      return join_at_port(address.substr(0, colon), *port, own, deadline);
    throw UsageError(
        text("hvd::init: init_method '", init_method,
             "': expected tcp://HOST:PORT with a port from 1 to 65535, where an address "
             "of IPv6 is in brackets, or file:///path"));
  }
  if (init_method.starts_with(kHvdrun))
    return join_through_hvdrun(init_method.substr(kHvdrun.size()), own, deadline);
  throw UsageError(
      text("hvd::init: init_method '", init_method,
           "': expected tcp://HOST:PORT, which rank 0 serves, or file:///path of a file "
           "that all ranks share"));
}

void Rendezvous::throw_absent(std::string_view what, int rank) const {
  throw PeerLostError(text("hvd::init: rank ", rank, " joined at ", place(),
                           " and has not sent its ", what, " in time; see whether it has ended"),
                      rank);
}

std::vector<Bytes> Rendezvous::exchange(std::string_view what, std::span<const std::byte> mine,
                                        Deadline deadline) {
  const auto key = [what](int rank) { return text(what, "/", rank); };
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
