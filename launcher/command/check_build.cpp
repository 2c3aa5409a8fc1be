#include "command/check_build.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "system/process.h"
#include "system/text.h"
#include "version.h"

namespace hvd::launcher {
namespace {

struct Captured {
  std::string text;  ///< stdout and stderr
  int code = 0;
};

Captured capture(const std::vector<std::string>& argv) {
  Captured captured;
  Pipe output = make_pipe();
  SpawnOptions options;
  options.argv = argv;
  options.environment = current_environment();
  options.stdout_fd = output.write_end.get();
  options.stderr_fd = output.write_end.get();
  const SpawnResult child = spawn(options);
  if (child.error != 0) return {std::strerror(child.error), 127};
  output.write_end.reset();
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = ::read(output.read_end.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    captured.text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  captured.code = decode_wait_status(status).code;
  return captured;
}

std::string first_line(const std::string& text) {
  return std::string(trim(text.substr(0, text.find('\n'))));
}

std::string mpirun_line(const std::string& mpirun) {
  const ProgramSearch found = find_program(mpirun);
  if (!found.executable) {
    return "mpirun: not found: expected '" + mpirun +
           "' in PATH; install Open MPI, or name its mpirun with HVD_MPIRUN; hvdrun --controller "
           "ucx does "
           "without\n";
  }
  const Captured version = capture({mpirun, "--version"});
  return "mpirun: " + found.path + ", " + first_line(version.text) + "\n";
}

std::string runtime_lines() {
  const std::filesystem::path helper =
      std::filesystem::path(own_executable()).parent_path() / "hvd-build-info";
  if (::access(helper.c_str(), X_OK) != 0)
    return "runtime: not found: expected " + helper.string() + "\n";
  const Captured info = capture({helper.string()});
  if (info.code == 0) return info.text;
  return "runtime: " + helper.string() + " ended with code " + std::to_string(info.code) + ": " +
         first_line(info.text) + "\n";
}

}  // namespace

std::string check_build(const std::string& mpirun) {
  std::string text = std::string("hvdrun: ") + kVersion + "\n";
  text += mpirun_line(mpirun);
  text += *kTorchVersion != '\0' ? std::string("LibTorch: ") + kTorchVersion + "\n"
                                 : std::string("LibTorch: not built: HVD_WITH_TORCH=OFF\n");
  return text + runtime_lines();
}

}  // namespace hvd::launcher
