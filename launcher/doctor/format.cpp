#include "doctor/format.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "base/text.h"

namespace hvd::launcher::doctor {

std::string format_number(double value) {
  std::array<char, 64> buffer{};
  const int length = std::abs(value) >= 1000
                         ? std::snprintf(buffer.data(), buffer.size(), "%.0f", value)
                         : std::snprintf(buffer.data(), buffer.size(), "%.3g", value);
  return {buffer.data(), static_cast<std::size_t>(length)};
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return text(format_number(value), " ", kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (std::abs(seconds) >= 1) return format_number(seconds) + " s";
  if (std::abs(seconds) >= 1e-3) return format_number(seconds * 1e3) + " ms";
  return format_number(seconds * 1e6) + " us";
}

std::string format_limit(const std::optional<std::uint64_t>& limit) {
  return limit ? text(*limit) : "unlimited";
}

std::string format_cpus(const std::vector<int>& cpus) {
  std::vector<std::string> ranges;
  for (std::size_t begin = 0; begin < cpus.size();) {
    std::size_t end = begin;
    while (end + 1 < cpus.size() && cpus[end + 1] == cpus[end] + 1) ++end;
    ranges.push_back(begin == end ? text(cpus[begin]) : text(cpus[begin], "-", cpus[end]));
    begin = end + 1;
  }
  return join_text(ranges, ",");
}

}  // namespace hvd::launcher::doctor
