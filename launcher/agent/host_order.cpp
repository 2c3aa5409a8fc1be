#include "agent/host_order.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/text.h"

namespace hvd::launcher {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxBytes = 256 << 20;
constexpr std::size_t kMaxDigits = 12;

/// Reads `size` bytes; fewer at the end of the file, or if no byte arrives for `timeout_ms`.
std::string read_bytes(int fd, std::size_t size, int timeout_ms) {
  std::string bytes;
  while (bytes.size() < size) {
    pollfd readable{fd, POLLIN, 0};
    const int ready = ::poll(&readable, 1, timeout_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    const std::size_t had = bytes.size();
    bytes.resize(std::min(size, had + 64 * 1024));
    const ssize_t count = ::read(fd, bytes.data() + had, bytes.size() - had);
    bytes.resize(had + static_cast<std::size_t>(std::max<ssize_t>(0, count)));
    if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) break;
  }
  return bytes;
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostOrder, folder, variables, program, size, ranks, renewal,
                                   heartbeat, kill)

std::string encode(const HostOrder& order) {
  std::string bytes;
  Json::to_msgpack(order, bytes);
  return text(bytes.size(), "\n", bytes);
}

std::optional<HostOrder> read_host_order(int fd, int timeout_ms) {
  std::string digits;
  while (digits.empty() || digits.back() != '\n') {
    const std::string next = read_bytes(fd, 1, timeout_ms);
    if (next.empty() || digits.size() >= kMaxDigits) return std::nullopt;
    digits += next;
  }
  digits.pop_back();
  const auto size = parse_number<std::size_t>(digits);
  if (!size || *size > kMaxBytes) return std::nullopt;
  try {
    auto order = Json::from_msgpack(read_bytes(fd, *size, timeout_ms)).get<HostOrder>();
    if (order.program.empty() || order.ranks.empty()) return std::nullopt;
    return order;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace hvd::launcher
