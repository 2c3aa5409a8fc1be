#pragma once

#include <cstddef>

namespace hvd {

/// A process set's channel for small operations that must not fuse: ChannelSpec::instance of it.
inline constexpr int kUrgentInstance = 4;
/// The elements of a collective on it take no more bytes than this: a larger one is moved for as
/// long as what it would overtake.
inline constexpr std::size_t kMostUrgentBytes = std::size_t{256} << 10;

}  // namespace hvd
