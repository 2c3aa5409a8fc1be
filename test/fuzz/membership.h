#pragma once

#include <cstddef>
#include <span>

namespace hvd::fuzz {

/// The bytes that a worker of an elastic job sends to hvdrun: messages after their lengths. They
/// reach a coordinator whose three workers run their first generation. @throws hvd::Error
void feed_worker_stream(std::span<const std::byte> input);

/// One message of membership. It reaches such a coordinator, or a member in each of its phases.
/// @throws hvd::Error
void feed_membership(std::span<const std::byte> input);

}  // namespace hvd::fuzz
