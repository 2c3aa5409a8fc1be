#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "bootstrap/messages.h"
#include "hvd/error.h"

namespace hvd::rendezvous {

inline Deadline in(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}
/// A deadline that a passing test never reaches.
inline Deadline soon() { return in(std::chrono::seconds(50)); }
/// A deadline that the test waits for.
inline Deadline short_time() { return in(std::chrono::milliseconds(300)); }

inline RankInfo info(int rank, int size, const std::string& build = "0.1.0") {
  return {.job = "train", .token = "secret", .build = build, .rank = rank, .size = size};
}

inline Bytes copy_of(const std::string& text) {
  const auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}
inline std::string shown(const std::optional<Bytes>& bytes) {
  return bytes ? text_of(*bytes) : "nothing";
}

/// "fine", "usage: ...", "lost 2: ..." or "error: ...".
inline std::string outcome_of(const std::function<void()>& call) {
  try {
    call();
    return "fine";
  } catch (const UsageError& error) {
    return std::string("usage: ") + error.what();
  } catch (const PeerLostError& error) {
    return "lost " + std::to_string(error.rank()) + ": " + error.what();
  } catch (const Error& error) {
    return std::string("error: ") + error.what();
  }
}
/// Runs each function on a thread of its own, and returns their outcomes.
inline std::vector<std::string> all_of(const std::vector<std::function<void()>>& ranks) {
  std::vector<std::string> outcomes(ranks.size());
  std::vector<std::jthread> threads;
  for (std::size_t index = 0; index < ranks.size(); ++index)
    threads.emplace_back([&, index] { outcomes[index] = outcome_of(ranks[index]); });
  threads.clear();  // joins
  return outcomes;
}

}  // namespace hvd::rendezvous
