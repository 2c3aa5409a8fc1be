#include "processes/host_order.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace hvd::launcher {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostBytes = 256 << 20;
constexpr std::size_t kMostDigits = 12;

/// Up to `size` bytes; fewer at the end, or if no byte arrives for `timeout_ms`.
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

std::string encode(const HostOrder& order) {
  // As bytes: names of files and values of variables need not be UTF-8.
  const auto bytes = [](const std::string& text) {
    return std::vector<int>(reinterpret_cast<const unsigned char*>(text.data()),
                            reinterpret_cast<const unsigned char*>(text.data()) + text.size());
  };
  Json variables = Json::array(), program = Json::array();
  for (const auto& [name, value] : order.variables) variables.push_back(bytes(name + "=" + value));
  for (const std::string& word : order.program) program.push_back(bytes(word));
  const std::string json = Json({{"folder", bytes(order.folder)},
                                 {"variables", variables},
                                 {"program", program},
                                 {"size", order.size},
                                 {"ranks", order.ranks}})
                               .dump();
  return std::to_string(json.size()) + "\n" + json;
}

std::optional<HostOrder> decode_host_order(std::string_view encoded) {
  const auto bytes = [](const Json& json) {
    const auto codes = json.get<std::vector<unsigned char>>();
    return std::string(codes.begin(), codes.end());
  };
  try {
    const Json json = Json::parse(encoded);
    HostOrder order;
    order.folder = bytes(json.at("folder"));
    for (const Json& entry : json.at("variables")) {
      const std::string variable = bytes(entry);
      const std::size_t equals = variable.find('=');
      if (equals == std::string::npos) return std::nullopt;
      order.variables.emplace_back(variable.substr(0, equals), variable.substr(equals + 1));
    }
    for (const Json& word : json.at("program")) order.program.push_back(bytes(word));
    json.at("size").get_to(order.size);
    json.at("ranks").get_to(order.ranks);
    if (order.program.empty() || order.ranks.empty()) return std::nullopt;
    return order;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::optional<HostOrder> read_host_order(int fd, int timeout_ms) {
  std::string digits;
  while (digits.empty() || digits.back() != '\n') {
    const std::string next = read_bytes(fd, 1, timeout_ms);
    if (next.empty() || digits.size() >= kMostDigits) return std::nullopt;
    digits += next;
  }
  digits.pop_back();
  const auto size = parse_number<std::size_t>(digits);
  if (!size || *size > kMostBytes) return std::nullopt;
  return decode_host_order(read_bytes(fd, *size, timeout_ms));
}

SpawnOptions supervisor_of(const std::string& hvdrun, const std::vector<std::string>& program,
                           const RankIdentity& identity, std::vector<std::string> environment) {
  SpawnOptions options;
  options.argv = {hvdrun, "--supervise", "--"};
  options.argv.insert(options.argv.end(), program.begin(), program.end());
  for (const auto& [name, value] :
       {std::pair(kRankVariable, identity.rank), std::pair(kSizeVariable, identity.size),
        std::pair(kLocalRankVariable, identity.local_rank),
        std::pair(kLocalSizeVariable, identity.local_size)})
    set_variable(environment, name, std::to_string(value));
  options.environment = std::move(environment);
  options.parent_death_signal = SIGTERM;
  // A terminal's Ctrl-C is for hvdrun only, which gives the ranks the grace period.
  options.own_process_group = true;
  return options;
}

}  // namespace hvd::launcher
