#include "system/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {

std::string_view trim(std::string_view line) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = line.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return line.substr(first, line.find_last_not_of(kBlank) - first + 1);
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? text("SIG", name) : text("signal ", signal);
}

std::string shell_quote(std::string_view word) {
  constexpr std::string_view kSafe =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%^";
  if (!word.empty() && word.find_first_not_of(kSafe) == std::string_view::npos)
    return std::string(word);
  std::string quoted = "'";
  for (const char c : word) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::vector<std::string> shell_split(std::string_view line) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false;
  char quote = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == quote) {
        quote = 0;
      } else if (c == '\\' && quote == '"' && i + 1 < line.size()) {
        word += line[++i];
      } else {
        word += c;
      }
    } else if (c == '\'' || c == '"') {
      quote = c;
      in_word = true;
    } else if (c == '\\' && i + 1 < line.size()) {
      word += line[++i];
      in_word = true;
    } else if (c == ' ' || c == '\t' || c == '\n') {
      if (in_word) words.push_back(std::exchange(word, {}));
      in_word = false;
    } else {
      word += c;
      in_word = true;
    }
  }
  if (quote != 0) {
    throw LaunchError(ExitCode::kUsage, text("expected every quote to be closed, got: ", line));
  }
  if (in_word) words.push_back(word);
  return words;
}

std::string format_duration(double seconds) {
  std::array<char, 64> buffer{};
  if (seconds < 60) {
    std::snprintf(buffer.data(), buffer.size(), "%.2f s", std::max(seconds, 0.0));
  } else {
    const auto whole = static_cast<long long>(seconds);
    std::snprintf(buffer.data(), buffer.size(), "%02lld:%02lld:%02lld", whole / 3600,
                  whole / 60 % 60, whole % 60);
  }
  return buffer.data();
}

bool is_backtrace(std::string_view line) {
  if (line.starts_with("frame #") || line.starts_with("Exception raised from ")) return true;
  // "[host:1234] [ 0] /lib/...", "[host:1234] *** Process received signal ***"
  const std::size_t end = line.find("] ");
  const std::size_t colon = line.find(':');
  if (!line.starts_with('[') || end == std::string_view::npos || colon > end || colon + 1 == end ||
      line.substr(colon + 1, end - colon - 1).find_first_not_of("0123456789") !=
          std::string_view::npos)
    return false;
  const std::string_view rest = line.substr(end + 2);
  if (rest.starts_with("*** Process received signal") ||
      rest.starts_with("*** End of error message"))
    return true;
  if (rest.starts_with("Signal: ") || rest.starts_with("Signal code: ") ||
      rest.starts_with("Associated errno: ") || rest.starts_with("Failing at address: "))
    return true;
  return rest.size() > 3 && rest[0] == '[' && (std::isdigit(rest[2]) != 0) &&
         rest.find(']') != std::string_view::npos && rest.find(']') <= 4;
}

}  // namespace hvd::launcher
