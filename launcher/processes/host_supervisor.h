#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command/rank_environment.h"
#include "system/process.h"

namespace hvd::launcher {

/// The order that `hvdrun --supervise-host` reads from its standard input, which no other user can
/// read: the ranks to start on its host, and their program.
struct HostOrder {
  std::string folder = {};  ///< the working folder
  std::vector<std::pair<std::string, std::string>> variables =
      {};  ///< added to that process's own environment
  std::vector<std::string> program = {};
  int size = 1;
  std::vector<int> ranks = {};  ///< ascending: the first is local rank 0
};

/// Encodes an order as a decimal number of bytes, a newline, and that many bytes of JSON. Rank 0's
/// input follows it.
std::string encode(const HostOrder& order);
/// Decodes the JSON alone. Empty if it is invalid.
std::optional<HostOrder> decode_host_order(std::string_view json);
/// Reads an order from a descriptor, without reading beyond it. Empty if it is invalid, or if no
/// byte arrives for `timeout_ms`.
std::optional<HostOrder> read_host_order(int fd, int timeout_ms);

/// A rank's supervisor as it is started without mpirun: `hvdrun --supervise`, with the rank in its
/// environment. It ends when this process does.
SpawnOptions supervisor_of(const std::string& hvdrun, const std::vector<std::string>& program,
                           const RankIdentity& identity, std::vector<std::string> environment);

/// `hvdrun --supervise-host`, which a remote shell starts once per host, in place of mpirun's
/// daemon. Reads a HostOrder from its standard input, starts a supervisor for each rank, and waits
/// for them. Returns the exit code of the first supervisor that failed, else 0.
int run_host_supervisor();

}  // namespace hvd::launcher
