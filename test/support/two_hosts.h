#pragma once

#include <string>
#include <vector>

namespace hvd::testing {

/// Runs a command of the shell; both kinds of its output, and in `code` how it ended (0: well).
std::string shell(const std::string& command, int& code);

/// Two "hosts" on one machine: network namespaces on one bridge, each with its own address and host
/// name. All else they share: processes, cores, /tmp, /dev/shm. They are named after this process,
/// so that tests may run side by side. Needs root and the right to make namespaces.
///
/// Not thread-safe. The destructor ends what still runs on them.
class TwoHosts {
 public:
  TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;
  ~TwoHosts();

  /// Why there are none; empty if there are.
  const std::string& missing() const noexcept { return missing_; }
  /// @pre the same of all that takes a host: it is 0 or 1.
  const std::string& name(int host) const { return names_.at(static_cast<std::size_t>(host)); }
  static std::string address(int host) { return "10.79.0." + std::to_string(host + 1); }
  /// What a command line begins with that is to run there.
  std::vector<std::string> prefix(int host) const;
  /// Takes the host's cable out; whether that worked.
  bool cut(int host) const;
  /// Puts it in again.
  bool mend(int host) const;
  /// Nothing leaves the host faster than so many Mbit/s.
  bool slow(int host, int megabits) const;
  /// Everything that runs there.
  std::vector<int> processes(int host) const;
  /// SIGKILL to all of it.
  void kill(int host) const;

 private:
  std::string switch_;  ///< the namespace of the bridge
  std::vector<std::string> names_;
  bool begun_ = false;
  std::string missing_;
};

}  // namespace hvd::testing
