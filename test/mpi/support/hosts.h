#pragma once

#include <cstdlib>
#include <string>
#include <vector>

namespace hvd::testing {

/// As long as it exists, ranks that join a world report these host names.
class PretendHosts {
 public:
  /// @param letters one per rank: "aabb"
  explicit PretendHosts(const std::string& letters) {
    std::string list;
    for (const char letter : letters) list += std::string(list.empty() ? "" : ",") + letter;
    ::setenv("HVD_TEST_HOSTS", list.c_str(), 1);
  }
  /// @param names one per rank
  explicit PretendHosts(const std::vector<std::string>& names) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
    ::setenv("HVD_TEST_HOSTS", list.c_str(), 1);
  }
  PretendHosts(const PretendHosts&) = delete;
  PretendHosts& operator=(const PretendHosts&) = delete;
  ~PretendHosts() { ::unsetenv("HVD_TEST_HOSTS"); }
};

}  // namespace hvd::testing
