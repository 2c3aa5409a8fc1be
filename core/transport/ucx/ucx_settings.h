#pragma once

#include <string>
#include <utility>
#include <vector>

namespace hvd::ucx {

/// Sets the variables that UCX reads only while it is loaded, except those that the user has set,
/// and removes them at the end of its scope. A process that another thread starts meanwhile
/// inherits them.
class LoadVariables {
 public:
  LoadVariables();
  LoadVariables(const LoadVariables&) = delete;
  LoadVariables& operator=(const LoadVariables&) = delete;
  ~LoadVariables();

 private:
  std::vector<const char*> set_;
};

/// Whether TCP is the only transport. Over TCP only the workers of the two ranks move a message.
bool only_tcp();

/// Names, without "UCX_", and values of the settings that hvd changes in a configuration of UCX.
/// Settings that the user has set in the environment are left out. Note [UCX's settings].
/// @param interface see open_workers()
std::vector<std::pair<std::string, std::string>> settings_to_change(const std::string& interface);

/// The interface that UCX is restricted to, by hvd or by the user; empty if it is not restricted to
/// one.
std::string interface_in_use(const std::string& interface);

}  // namespace hvd::ucx
