#pragma once

#include <cstddef>
#include <span>

/// Feeds an input of the fuzzer or of its smoke test. The code under test may throw only
/// hvd::Error, which is ignored. Anything else, including a sanitizer's report, is a finding.
namespace hvd::fuzz {

/// The first byte of an input that is a session, a file of safetensors, or the stream of a worker's
/// messages of membership; any other input is one message, of membership if it begins with its
/// magic.
inline constexpr std::byte kSession{'S'}, kSafetensors{'T'}, kWorkerStream{'W'}, kMembership{'m'};

enum class Step : unsigned { kReport = 0, kPlan = 1, kDecide = 2, kPublish = 3 };

/// A session is a list of steps. Each is one byte, step * 8 + rank, and for a report or a plan a
/// byte n and n bytes of the message behind its header:
///   report   a report arrives at the coordinator
///   plan     the plan arrives at the rank
///   decide   time goes on by `rank` seconds and the coordinator decides
///   publish  every rank applies the plan that the coordinator decided last
void feed(std::span<const std::byte> input);

}  // namespace hvd::fuzz
