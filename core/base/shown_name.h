#pragma once

#include <string_view>

namespace hvd {

/// An operation's name as texts and timelines show it: without a first character below space.
/// Frameworks put one before the name to keep the names of their kinds of operation apart.
constexpr std::string_view shown_name(std::string_view name) noexcept {
  const bool marked = !name.empty() && static_cast<unsigned char>(name.front()) < ' ';
  return marked ? name.substr(1) : name;
}

}  // namespace hvd
