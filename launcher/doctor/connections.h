#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "doctor/facts.h"
#include "system/unique_fd.h"

namespace hvd::launcher::doctor {

/// The TCP connections of this process to other hosts, each pair of addresses once.
std::vector<Connection> remote_connections();

/// Accepts connections at a free port of all addresses, and answers each with a greeting. Its
/// thread ends with it.
class Greeter {
 public:
  /// @param greeting at most 100 bytes
  explicit Greeter(std::string greeting);
  /// 0: it cannot listen; problem() is the reason.
  std::uint16_t port() const { return port_; }
  const std::string& problem() const { return problem_; }

 private:
  void serve(const std::stop_token& stop) const;

  const std::string greeting_;
  std::string problem_;
  UniqueFd socket_;
  std::uint16_t port_ = 0;
  std::jthread thread_;
};

/// Another host's Greeter.
struct GreeterAddress {
  int rank = 0;
  std::uint16_t port = 0;
  std::string greeting;
  std::vector<Interface> interfaces;
};

/// Connects to every address of a greeter at the same time, for a second at most. An address is
/// reached if the expected greeting arrives: a bridge's address may also be this host's own.
std::vector<Reach> try_addresses(const GreeterAddress& greeter);

}  // namespace hvd::launcher::doctor
