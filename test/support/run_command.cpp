#include "support/run_command.h"

#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>

namespace hvd::testing {

CommandResult run_command(const std::string& command, int seconds) {
  std::FILE* const pipe = ::popen(
      ("timeout -s KILL " + std::to_string(seconds) + " " + command + " 2>&1").c_str(), "r");
  if (pipe == nullptr)
    throw std::system_error(errno, std::generic_category(), "cannot run " + command);
  CommandResult result;
  std::array<char, 4096> buffer;
  while (const std::size_t size = std::fread(buffer.data(), 1, buffer.size(), pipe))
    result.output.append(buffer.data(), size);
  const int status = ::pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace hvd::testing
