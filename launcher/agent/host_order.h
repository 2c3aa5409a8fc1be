#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hvd::launcher {

/// The order that `hvdrun --agent` reads from its standard input, where other users cannot see it:
/// the ranks to start on its host, and their program.
struct HostOrder {
  std::string folder = {};  ///< the working folder; empty: as it is
  std::vector<std::pair<std::string, std::string>> variables =
      {};  ///< added to that process's own environment
  std::vector<std::string> program = {};
  int size = 1;
  std::vector<int> ranks = {};  ///< ascending: the first is local rank 0
  /// In an elastic job `ranks` are slots, whose workers hvdrun starts one by one. Times in
  /// nanoseconds: the interval between requests of the lease, the time for which an answer is
  /// valid, and the time that the agent may take to end its workers. `heartbeat` is 0 in an
  /// ordinary job.
  long long renewal = 0, heartbeat = 0, kill = 0;
};

/// Encodes an order as a decimal number of bytes, a newline, and that many bytes of MessagePack, in
/// which texts, such as file names and values of variables, need not be UTF-8. Rank 0's input
/// follows it.
std::string encode(const HostOrder& order);
/// Reads an order from a descriptor, without reading beyond it. Empty if it is invalid, or if no
/// byte arrives for `timeout_ms`.
std::optional<HostOrder> read_host_order(int fd, int timeout_ms);

}  // namespace hvd::launcher
