#pragma once

#include <charconv>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

#include "base/rank_set.h"

// Header-only, so that the launcher and the LibTorch adapter can use it without linking hvd_base.

namespace hvd {
namespace text_detail {

template <class Number, class... Format>
void append_number(std::string& out, Number number, Format... format) {
  char digits[400];  // the largest double has 309 digits before the point
  const auto end = std::to_chars(digits, digits + sizeof digits, number, format...).ptr;
  out.append(digits, end);
}

template <class Rep, class Period>
void append_part(std::string& out, std::chrono::duration<Rep, Period> duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  const bool is_short = seconds != 0 && seconds < 0.1 && seconds > -0.1;
  append_number(out, is_short ? seconds * 1000 : seconds, std::chars_format::fixed,
                is_short ? 0 : 1);
  out += is_short ? " ms" : " s";
}

template <class Part>
void append_part(std::string& out, const Part& part) {
  static_assert(!std::same_as<Part, bool>, "write a boolean value in words");
  if constexpr (std::same_as<Part, char>) {
    out += part;
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    out += std::string_view(part);
  } else if constexpr (std::is_arithmetic_v<Part>) {
    append_number(out, part);
  } else if constexpr (requires { out += to_string(part); }) {
    out += to_string(part);
  } else {
    out += std::string(part);
  }
}

}  // namespace text_detail

/// Joins the parts to one text: `text("rank ", 3, " waited ", 2500ms)` is "rank 3 waited 2.5 s".
///
/// A part is a string, a character, a number, a duration, a path, or of a type that has a
/// to_string(). A floating-point number has the fewest digits that identify it. A duration is in
/// seconds with one digit after the point, or in whole milliseconds if it is shorter than 0.1 s.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::string joined;
  (text_detail::append_part(joined, parts), ...);
  return joined;
}

/// Reads a number that is the whole text, independent of the locale. Empty if the text is anything
/// else or if the number does not fit in the type. Like std::from_chars(), it refuses blanks, a
/// leading "+" and, for an unsigned type, a leading "-".
template <class Number>
std::optional<Number> parse_number(std::string_view digits) {
  Number number{};
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

/// The same for an integer in another base, without a prefix such as "0x".
template <std::integral Number>
std::optional<Number> parse_number(std::string_view digits, int base) {
  Number number{};
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number, base);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

/// Splits at each separator: "a,,b" has three parts, "" has one. The parts point into `whole`.
inline std::vector<std::string_view> split_text(std::string_view whole, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = whole.find(separator, begin);
    parts.push_back(whole.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

/// Joins a range of anything that text() takes: `join_text(names, ", ", " and ")` is "a, b and c".
/// @param last_separator stands before the last of several parts; the same as `separator` by
/// default
template <class Range>
std::string join_text(const Range& parts, std::string_view separator,
                      std::optional<std::string_view> last_separator = std::nullopt) {
  std::string joined;
  const std::size_t size = std::size(parts);
  std::size_t index = 0;
  for (const auto& part : parts) {
    if (index > 0) joined += index + 1 == size ? last_separator.value_or(separator) : separator;
    text_detail::append_part(joined, part);
    ++index;
  }
  return joined;
}

/// Ranks without the noun, as in "3", "0 and 1" or "0 to 3, 5 and 7": three or more consecutive
/// ranks form a range. Lists at most 16 ranks and ranges, and counts the remaining ranks, as in
/// "0, 2, 4 and 96 more". Empty if there are no ranks.
inline std::string rank_numbers(RankSpan ranks) {
  constexpr std::size_t kMaxShown = 16;
  std::vector<std::string> shown;
  std::size_t hidden = 0;
  const auto add = [&](int first, int last) {
    if (shown.size() < kMaxShown) {
      shown.push_back(first == last ? text(first) : text(first, " to ", last));
    } else {
      hidden += static_cast<std::size_t>(last - first) + 1;
    }
  };
  for (const RankRange range : ranks) {
    if (range.last == range.first + 1) {
      add(range.first, range.first);
      add(range.last, range.last);
    } else {
      add(range.first, range.last);
    }
  }
  if (hidden > 0) shown.push_back(text(hidden, " more"));
  return join_text(shown, ", ", " and ");
}

/// The same for ascending ranks.
inline std::string rank_numbers(std::span<const int> ranks) {
  std::vector<RankRange> ranges;
  for (const int rank : ranks) {
    if (!ranges.empty() && ranges.back().last + 1 == rank) {
      ranges.back().last = rank;
    } else {
      ranges.push_back({rank, rank});
    }
  }
  return rank_numbers(RankSpan(ranges));
}

/// Ranks with the noun: "rank 3", "ranks 0 to 3 and 7", "no rank". See rank_numbers().
inline std::string rank_list(RankSpan ranks) {
  if (ranks.empty()) return "no rank";
  const bool one = ranks.size() == 1 && ranks.front().first == ranks.front().last;
  return text(one ? "rank " : "ranks ", rank_numbers(ranks));
}

/// The same for ascending ranks.
inline std::string rank_list(std::span<const int> ranks) {
  if (ranks.empty()) return "no rank";
  return text(ranks.size() == 1 ? "rank " : "ranks ", rank_numbers(ranks));
}

}  // namespace hvd
