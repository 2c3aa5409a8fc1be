#include "public/reconfigure_handle.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/text.h"

namespace hvd::runtime {
namespace {

constexpr std::string_view kVersion = "hvd1";
constexpr std::size_t kMaxBytes = 3000;

bool is_word(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c > ' ' && c < '\x7f'; });
}

/// Replaces a name of the system that may be empty by a word that is not.
std::string word(const std::string& text) { return is_word(text) ? text : "?"; }

}  // namespace

// VERSION BOOT NAME NAMESPACE PID START ID and the address, separated by spaces, which no word has.
std::string encode(const ReconfigureHandle& handle) {
  const auto& process = handle.process;
  return text(kVersion, " ", word(process.boot), " ", word(process.host), " ",
              process.pid_namespace, " ", process.pid, " ", process.start_time, " ", handle.id, " ",
              elastic::encode(handle.address));
}

std::optional<ReconfigureHandle> decode_reconfigure_handle(const std::string& encoded) {
  if (encoded.size() > kMaxBytes) return std::nullopt;
  constexpr std::size_t kWords = 7;
  std::vector<std::string> words;
  std::size_t begin = 0;
  while (words.size() < kWords) {
    const std::size_t end = encoded.find(' ', begin);
    if (end == std::string::npos) return std::nullopt;
    words.push_back(encoded.substr(begin, end - begin));
    if (!is_word(words.back())) return std::nullopt;
    begin = end + 1;
  }
  const auto pid_namespace = parse_number<std::uint64_t>(words[3]);
  const auto pid = parse_number<std::int64_t>(words[4]);
  const auto start_time = parse_number<std::uint64_t>(words[5]);
  auto address = elastic::decode_peer_address(encoded.substr(begin));
  if (words[0] != kVersion || !pid_namespace || !pid || !start_time || !address)
    return std::nullopt;
  return ReconfigureHandle{.address = std::move(*address),
                           .process = {.host = words[2],
                                       .boot = words[1] == "?" ? "" : words[1],
                                       .pid = *pid,
                                       .start_time = *start_time,
                                       .pid_namespace = *pid_namespace},
                           .id = words[6]};
}

}  // namespace hvd::runtime
