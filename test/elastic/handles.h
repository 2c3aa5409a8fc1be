#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "elastic/forked_ranks.h"
#include "hvd/error.h"
#include "hvd/reconfigure.h"

namespace hvd::testing {

inline constexpr Options kLongTimeout{.init_timeout = std::chrono::milliseconds(20'000)};
/// For calls that fail at their deadline. The other members arrive before it, also on a slow host.
inline constexpr Options kShortTimeout{.init_timeout = std::chrono::milliseconds(4'000)};

/// Exchanges the handles of these processes for hvd::reconfigure().
inline std::vector<std::string> exchange_handles(Blackboard& board, int topic, int own,
                                                 const std::vector<int>& processes) {
  board.post(topic, own, reconfigure_handle());
  std::vector<std::string> handles;
  for (const int process : processes) handles.push_back(board.read(topic, process));
  return handles;
}

/// Waits until all of these processes have called it.
inline void meet(Blackboard& board, int topic, int own, const std::vector<int>& processes) {
  board.post(topic, own);
  for (const int process : processes) board.read(topic, process);
}

/// The text of the PeerLostError of a call, whose rank() is checked.
inline std::string error_of(std::int64_t uuid, const std::vector<std::string>& handles,
                            const Options& options, int expected_rank) {
  try {
    reconfigure(uuid, handles, options);
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), expected_rank) << error.what();
    return error.what();
  }
  return "no PeerLostError";
}

}  // namespace hvd::testing
