#pragma once

#include <cstdlib>
#include <string>

namespace hvd::testing {

/// While it lives, ranks that join a world pretend to be on these hosts: one letter per rank,
/// "aabb".
class PretendHosts {
 public:
  explicit PretendHosts(const std::string& letters) {
    std::string list;
    for (const char letter : letters) list += std::string(list.empty() ? "" : ",") + letter;
    ::setenv("HVD_TEST_HOSTS", list.c_str(), 1);
  }
  PretendHosts(const PretendHosts&) = delete;
  PretendHosts& operator=(const PretendHosts&) = delete;
  ~PretendHosts() { ::unsetenv("HVD_TEST_HOSTS"); }
};

}  // namespace hvd::testing
