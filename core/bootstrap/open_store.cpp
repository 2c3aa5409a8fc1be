#include "bootstrap/open_store.h"

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/text.h"
#include "bootstrap/file_store.h"
#include "bootstrap/socket_store.h"
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

std::unique_ptr<Store> open_store(const std::string& init_method, const RankInfo& own,
                                  Deadline deadline) {
  check(own);
  if (init_method.starts_with(kFile)) {
    const std::string path = init_method.substr(kFile.size());
    if (path.size() >= 2 && path.front() == '/' && path.back() != '/')
      return open_file_store(path, own.job);
    throw UsageError(text("hvd::init: init_method '", init_method,
                          "': expected the absolute path of a file, as in file:///shared/job"));
  }
  if (init_method.starts_with(kTcp)) {
    const std::string address = init_method.substr(kTcp.size());
    const auto colon = address.rfind(':');
    const auto port =
        colon == std::string::npos ? std::nullopt : port_in(address.substr(colon + 1));
    if (port && is_host(std::string_view(address).substr(0, colon)))
      return open_tcp_store(address.substr(0, colon), *port, own, deadline);
    throw UsageError(
        text("hvd::init: init_method '", init_method,
             "': expected tcp://HOST:PORT with a port from 1 to 65535, where an address "
             "of IPv6 is in brackets, or file:///path"));
  }
  if (init_method.starts_with(kHvdrun))
    return open_hvdrun_store(init_method.substr(kHvdrun.size()), own, deadline);
  throw UsageError(
      text("hvd::init: init_method '", init_method,
           "': expected tcp://HOST:PORT, which rank 0 serves, or file:///path of a file "
           "that all ranks share"));
}

}  // namespace hvd::rendezvous
