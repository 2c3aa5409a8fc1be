#include "processes/host_supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/text.h"
#include "processes/rank_supervisor.h"
#include "system/error.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostBytes = 256 << 20;
constexpr std::size_t kMostDigits = 12;
constexpr int kOrderTimeoutMs = 60'000;

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

std::vector<pid_t> start_supervisors(const HostOrder& order) {
  std::vector<std::string> environment = current_environment();
  for (const auto& [name, value] : order.variables) set_variable(environment, name, value);
  set_variable(environment, "PWD", order.folder);
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  RankIdentity identity{.size = order.size, .local_size = static_cast<int>(order.ranks.size())};
  std::vector<pid_t> supervisors;
  for (const int rank : order.ranks) {
    identity.rank = rank;
    SpawnOptions options = supervisor_of(own_executable(), order.program, identity, environment);
    if (rank != 0) options.stdin_fd = no_input.get();  // rank 0 reads this process's input
    supervisors.push_back(start_process(options, "; expected hvdrun itself: was it replaced?"));
    ++identity.local_rank;
  }
  return supervisors;
}

}  // namespace

std::string encode(const HostOrder& order) {
  // Encodes texts as bytes, because file names and values of variables need not be UTF-8.
  const auto bytes = [](std::string_view word) {
    std::vector<int> codes;
    for (const char c : word) codes.push_back(static_cast<unsigned char>(c));
    return codes;
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
  return text(json.size(), "\n", json);
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
    set_variable(environment, name, text(value));
  options.environment = std::move(environment);
  options.parent_death_signal = SIGTERM;
  // Only hvdrun handles Ctrl-C on a terminal: it gives the ranks the grace period.
  options.own_process_group = true;
  return options;
}
int run_host_supervisor() {
  const auto order = read_host_order(STDIN_FILENO, kOrderTimeoutMs);
  if (!order) {
    throw LaunchError(ExitCode::kUsage,
                      "--supervise-host is for hvdrun's own use: expected its order at standard "
                      "input, got something else or no bytes; is the hvdrun on this host of "
                      "another version?");
  }
  if (::chdir(order->folder.c_str()) != 0) {
    throw LaunchError(ExitCode::kUnavailable,
                      text(own_hostname(), ": cannot enter ", order->folder,
                           ", the folder that hvdrun was started in: ", std::strerror(errno)));
  }
  const sigset_t signals = supervised_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::vector<pid_t> supervisors = start_supervisors(*order);
  int code = 0;
  while (!supervisors.empty()) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    std::erase_if(supervisors, [&](pid_t supervisor) {
      if (signal > 0 && signal != SIGCHLD) ::kill(supervisor, signal);
      const auto end = try_wait(supervisor);
      if (end && code == 0) code = end->code;
      return end.has_value();
    });
  }
  return code;
}

}  // namespace hvd::launcher
