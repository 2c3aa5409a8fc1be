#include "command/hosts.h"

#include <netdb.h>
#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <asio/ip/address.hpp>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "system/children.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

constexpr int kMaxSlots = 1'000'000;
constexpr std::size_t kMaxLookups = 64;  ///< at the same time

std::optional<int> parse_slots(std::string_view text) {
  const auto slots = parse_number<int>(text);
  return slots && *slots >= 1 && *slots <= kMaxSlots ? slots : std::nullopt;
}

bool is_word(std::string_view text, std::string_view more) {
  return !text.empty() && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [more](unsigned char c) {
           return std::isalnum(c) != 0 || more.find(static_cast<char>(c)) != more.npos;
         });
}

bool is_ipv6(const std::string& text) {
  asio::error_code error;
  asio::ip::make_address_v6(text.substr(0, text.find('%')), error);
  return !error;
}

bool is_here(const Host& host, std::string_view own_hostname) {
  return host.local || (host.user.empty() && is_local_host(host.name, own_hostname));
}

/// The usual form of a numeric address; empty if the text is not one.
std::string normal_address(const std::string& text) {
  asio::error_code error;
  const auto address = asio::ip::make_address(text, error);
  return error ? "" : address.to_string();
}

std::vector<std::string> addresses_of(const std::string& name) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  std::vector<std::string> addresses;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return addresses;
  std::array<char, NI_MAXHOST> buffer;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (::getnameinfo(entry->ai_addr, entry->ai_addrlen, buffer.data(), buffer.size(), nullptr, 0,
                      NI_NUMERICHOST) == 0)
      addresses.emplace_back(buffer.data());
  }
  ::freeaddrinfo(list);
  return addresses;
}

/// Looks all names up at the same time, and leaves out those without a result after a second.
std::map<std::string, std::vector<std::string>> resolve_names(
    const std::vector<std::string>& names) {
  const auto look_up = [&names](int fd) {
    std::atomic<std::size_t> next{0};
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < std::min(names.size(), kMaxLookups); ++i) {
      threads.emplace_back([fd, &names, &next] {
        for (std::size_t at = next++; at < names.size(); at = next++) {
          for (const std::string& address : addresses_of(names[at])) {
            const std::string line = text(names[at], " ", address, "\n");
            if (::write(fd, line.data(), line.size()) < 0) return;
          }
        }
      });
    }
  };
  const std::string lines = run_children({{.function = look_up}}, 1).front().out;
  std::map<std::string, std::vector<std::string>> found;
  for (const std::string_view line : split_text(lines, '\n')) {
    const std::size_t blank = line.find(' ');
    if (blank != line.npos)
      found[std::string(line.substr(0, blank))].emplace_back(line.substr(blank + 1));
  }
  return found;
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

std::optional<Host> parse_host(std::string_view text, int slots) {
  Host host{.name = {}, .slots = slots};
  if (const std::size_t at = text.find('@'); at != std::string_view::npos) {
    host.user = text.substr(0, at);
    if (!is_word(host.user, "._-")) return std::nullopt;
    text.remove_prefix(at + 1);
  }
  std::string_view rest;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    host.name = text.substr(1, end - 1);
    if (!is_ipv6(host.name)) return std::nullopt;
    rest = text.substr(end + 1);
    if (!rest.empty() && rest.front() != ':') return std::nullopt;
  } else {
    host.name = text.substr(0, text.find(':'));
    if (!is_word(host.name, "._-")) return std::nullopt;
    rest = text.substr(host.name.size());
  }
  if (rest.empty()) return host;
  const auto given = parse_slots(rest.substr(1));
  if (!given) return std::nullopt;
  host.slots = *given;
  return host;
}

void add_host(std::vector<Host>& hosts, const Host& host) {
  const auto known = std::find_if(hosts.begin(), hosts.end(), [&](const Host& other) {
    return other.name == host.name &&
           (other.user == host.user || other.user.empty() || host.user.empty());
  });
  if (known == hosts.end()) {
    hosts.push_back(host);
  } else {
    known->slots += host.slots;
    if (known->user.empty()) known->user = host.user;
  }
}

std::vector<Host> parse_host_list(std::string_view list) {
  std::vector<Host> hosts;
  for (const std::string_view part : split_text(list, ',')) {
    const auto host = parse_host(trim(part));
    if (!host) {
      throw LaunchError(ExitCode::kUsage,
                        text("-H: expected HOST or HOST:SLOTS separated by commas, as in "
                             "h1:2,user@h2:2,[fd00::3]:2; got '",
                             part, "' in '", list, "'"));
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
  for (const Host& host : hosts) {
    const bool ipv6 = host.name.find(':') != std::string::npos;
    const std::string user = host.user.empty() ? "" : host.user + "@";
    parts.push_back(text(user, ipv6 ? "[" : "", host.name, ipv6 ? "]:" : ":", host.slots));
  }
  return join_text(parts, ",");
}

std::string shell_target(const Host& host) {
  return host.user.empty() ? host.name : text(host.user, "@", host.name);
}

OwnNames own_names() {
  const passwd* const entry = ::getpwuid(::geteuid());
  return {.hostname = own_hostname(),
          .addresses = reachable_addresses(),
          .user = entry != nullptr ? entry->pw_name : "",
          .resolve = resolve_names};
}

bool is_local_host(std::string_view name, std::string_view own_hostname) {
  if (name == "localhost" || name == own_hostname || is_loopback(std::string(name))) return true;
  if (name.find_first_not_of("0123456789.") == std::string_view::npos) return false;
  const bool one_is_short =
      name.find('.') == std::string_view::npos || own_hostname.find('.') == std::string_view::npos;
  return one_is_short &&
         name.substr(0, name.find('.')) == own_hostname.substr(0, own_hostname.find('.'));
}

void mark_local_hosts(std::vector<Host>& hosts, const OwnNames& own) {
  std::vector<std::string> unknown;
  const auto is_own_user = [&](const Host& host) {
    return host.user.empty() || host.user == own.user;
  };
  const auto is_own_address = [&](const std::string& address) {
    return is_loopback(address) ||
           std::find(own.addresses.begin(), own.addresses.end(), address) != own.addresses.end();
  };
  for (Host& host : hosts) {
    host.local = is_own_user(host) && (is_local_host(host.name, own.hostname) ||
                                       is_own_address(normal_address(host.name)));
    if (!host.local && is_own_user(host) && normal_address(host.name).empty())
      unknown.push_back(host.name);
  }
  if (unknown.empty()) return;
  const auto found = own.resolve(unknown);
  for (Host& host : hosts) {
    const auto addresses = found.find(host.name);
    if (host.local || !is_own_user(host) || addresses == found.end()) continue;
    host.local = std::any_of(addresses->second.begin(), addresses->second.end(), is_own_address);
  }
}

bool all_local(const std::vector<Host>& hosts, std::string_view own_hostname) {
  return std::all_of(hosts.begin(), hosts.end(),
                     [&](const Host& host) { return is_here(host, own_hostname); });
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
    const bool local = is_here(host, own_hostname);
    const std::string target = shell_target(host);
    auto known = std::find_if(placed.begin(), placed.end(), [&](const HostRanks& other) {
      return other.host == target || (local && other.local);
    });
    for (int slot = 0; slot < host.slots && rank < np; ++slot) {
      if (known == placed.end())
        known = placed.insert(known, {.host = target, .local = local, .ranks = {}});
      known->ranks.push_back(rank++);
    }
  }
  return placed;
}

}  // namespace hvd::launcher
