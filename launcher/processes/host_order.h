#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command/rank_environment.h"
#include "system/process.h"

namespace hvd::launcher {

/// What `hvdrun --supervise-host` is told at its standard input, where no other user can read it:
/// the ranks that it is to start on its host, and with what.
struct HostOrder {
  std::string folder = {};                                          ///< to work in
  std::vector<std::pair<std::string, std::string>> variables = {};  ///< beyond those it finds
  std::vector<std::string> program = {};
  int size = 1;
  std::vector<int> ranks = {};  ///< ascending: the first is local rank 0
};

/// A decimal number of bytes, a newline, and so many bytes of JSON. What follows is rank 0's input.
std::string encode(const HostOrder& order);
/// Of the JSON alone. Nothing when it is none.
std::optional<HostOrder> decode_host_order(std::string_view json);
/// Takes it from a descriptor, and not a byte more. Nothing when what comes is none, or nothing
/// comes for `timeout_ms`.
std::optional<HostOrder> read_host_order(int fd, int timeout_ms);

/// A rank's supervisor as it is started without mpirun: `hvdrun --supervise`, with the rank in its
/// environment. It ends when this process does.
SpawnOptions supervisor_of(const std::string& hvdrun, const std::vector<std::string>& program,
                           const RankIdentity& identity, std::vector<std::string> environment);

}  // namespace hvd::launcher
