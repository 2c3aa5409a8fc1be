#include "command/hosts.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

constexpr int kMaxSlots = 1'000'000;

std::optional<int> parse_slots(std::string_view text) {
  const auto slots = parse_number<int>(text);
  return slots && *slots >= 1 && *slots <= kMaxSlots ? slots : std::nullopt;
}

bool is_host_name(std::string_view text) {
  return !text.empty() && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
         });
}

/// Parses "host" or "host:N".
std::optional<Host> parse_host(std::string_view text) {
  Host host;
  const std::size_t colon = text.find(':');
  host.name = text.substr(0, colon);
  if (!is_host_name(host.name)) return std::nullopt;
  if (colon != std::string_view::npos) {
    const auto slots = parse_slots(text.substr(colon + 1));
    if (!slots) return std::nullopt;
    host.slots = *slots;
  }
  return host;
}

void add_host(std::vector<Host>& hosts, const Host& host) {
  const auto known =
      std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == host.name; });
  if (known == hosts.end()) {
    hosts.push_back(host);
  } else {
    known->slots += host.slots;
  }
}

std::optional<Host> parse_hostfile_line(std::string_view line) {
  std::istringstream words{std::string(line)};
  std::string word;
  words >> word;
  auto host = parse_host(word);
  while (host && words >> word) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) return std::nullopt;
    if (word.substr(0, equals) != "slots") continue;
    const auto slots = parse_slots(std::string_view(word).substr(equals + 1));
    if (!slots) return std::nullopt;
    host->slots = *slots;
  }
  return host;
}

}  // namespace

std::vector<Host> parse_host_list(std::string_view list) {
  std::vector<Host> hosts;
  for (const std::string_view part : split_text(list, ',')) {
    const auto host = parse_host(trim(part));
    if (!host) {
      throw LaunchError(
          ExitCode::kUsage,
          text("-H: expected HOST or HOST:SLOTS separated by commas, as in h1:2,h2:2; got '", part,
               "' in '", list, "'"));
    }
    add_host(hosts, *host);
  }
  return hosts;
}

std::vector<Host> parse_hostfile(std::string_view content, std::string_view file) {
  std::vector<Host> hosts;
  int number = 0;
  for (const std::string_view raw : split_text(content, '\n')) {
    ++number;
    const std::string_view line = trim(raw.substr(0, raw.find('#')));
    if (line.empty()) continue;
    const auto host = parse_hostfile_line(line);
    if (!host) {
      throw LaunchError(
          ExitCode::kUsage,
          text("hostfile ", file, ", line ", number,
               ": expected 'HOST slots=N' or 'HOST:N' with N at least 1; got '", line, "'"));
    }
    add_host(hosts, *host);
  }
  if (hosts.empty()) {
    throw LaunchError(
        ExitCode::kUsage,
        text("hostfile ", file, ": expected at least one line 'HOST slots=N'; got none"));
  }
  return hosts;
}

std::vector<Host> read_hostfile(const std::string& file) {
  std::ifstream stream(file);
  if (!stream.is_open()) {
    throw LaunchError(
        ExitCode::kUsage,
        text("hostfile ", file,
             ": expected a readable file with lines 'HOST slots=N'; got: ", std::strerror(errno)));
  }
  std::ostringstream content;
  content << stream.rdbuf();
  return parse_hostfile(content.str(), file);
}

int total_slots(const std::vector<Host>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const Host& h) { return sum + h.slots; });
}

std::string format_hosts(const std::vector<Host>& hosts) {
  std::vector<std::string> parts;
  for (const Host& host : hosts) parts.push_back(text(host.name, ":", host.slots));
  return join_text(parts, ",");
}

bool is_local_host(std::string_view name, std::string_view own_hostname) {
  if (name == "localhost" || name == "127.0.0.1" || name == own_hostname) return true;
  if (name.find_first_not_of("0123456789.") == std::string_view::npos) return false;
  const bool one_is_short =
      name.find('.') == std::string_view::npos || own_hostname.find('.') == std::string_view::npos;
  return one_is_short &&
         name.substr(0, name.find('.')) == own_hostname.substr(0, own_hostname.find('.'));
}

bool all_local(const std::vector<Host>& hosts, std::string_view own_hostname) {
  return std::all_of(hosts.begin(), hosts.end(),
                     [&](const Host& h) { return is_local_host(h.name, own_hostname); });
}

std::vector<HostRanks> place_ranks(int np, const std::vector<Host>& hosts,
                                   const std::string& own_hostname) {
  if (hosts.empty()) {
    HostRanks all{.host = own_hostname, .local = true, .ranks = {}};
    all.ranks.resize(static_cast<std::size_t>(np));
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    return {std::move(all)};
  }
  std::vector<HostRanks> placed;
  int rank = 0;
  for (const Host& host : hosts) {
    const bool local = is_local_host(host.name, own_hostname);
    auto known = std::find_if(placed.begin(), placed.end(), [&](const HostRanks& other) {
      return other.host == host.name || (local && other.local);
    });
    for (int slot = 0; slot < host.slots && rank < np; ++slot) {
      if (known == placed.end())
        known = placed.insert(known, {.host = host.name, .local = local, .ranks = {}});
      known->ranks.push_back(rank++);
    }
  }
  return placed;
}

}  // namespace hvd::launcher
