#pragma once

#include <string>
#include <vector>

namespace hvd::testing {

/// Runs a shell command. Returns its stdout and stderr, and stores its exit code in `code`.
std::string shell(const std::string& command, int& code);

/// Two "hosts" on one machine: network namespaces on one bridge, each with its own address and host
/// name. They share everything else: processes, cores, /tmp, /dev/shm. Their names contain the pid
/// of this process, so that tests can run at the same time. Needs root and the right to make
/// namespaces.
///
/// Not thread-safe. The destructor ends the processes that still run on them.
class TwoHosts {
 public:
  TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;
  ~TwoHosts();

  /// Why the hosts could not be made; empty if they exist.
  const std::string& missing() const noexcept { return missing_; }
  /// @pre in all functions the host is 0 or 1
  const std::string& name(int host) const { return names_.at(static_cast<std::size_t>(host)); }
  static std::string address(int host) { return "10.79.0." + std::to_string(host + 1); }
  /// The beginning of a command line that runs on the host.
  std::vector<std::string> prefix(int host) const;
  /// Disconnects the host from the network. Returns whether that worked.
  bool cut(int host) const;
  /// Connects it again.
  bool mend(int host) const;
  /// Limits the rate at which the host sends, in Mbit/s.
  bool slow(int host, int megabits) const;
  /// The processes that run on the host.
  std::vector<int> processes(int host) const;
  /// Sends SIGKILL to all of them.
  void kill(int host) const;

 private:
  std::string switch_;  ///< the namespace of the bridge
  std::vector<std::string> names_;
  bool begun_ = false;
  std::string missing_;
};

}  // namespace hvd::testing
