#include "command/controller.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "system/needed_libraries.h"
#include "system/process.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kUcxLibrary = "libucp.so.0";

/// libmpi.so.40, libmpi_cxx.so.40, libmpi_mpifh.so.40, libmpich.so.12; not libmpir.so.23.
bool is_of_mpi(std::string_view library) {
  return library.starts_with("libmpi.") || library.starts_with("libmpi_") ||
         library.starts_with("libmpich");
}

}  // namespace

std::string_view to_string(Controller controller) {
  switch (controller) {
    case Controller::kMpi:
      return "mpi";
    case Controller::kUcx:
      return "ucx";
    case Controller::kAuto:
      break;
  }
  return "auto";
}

std::optional<Controller> parse_controller(std::string_view text) {
  for (const Controller controller : {Controller::kAuto, Controller::kMpi, Controller::kUcx}) {
    if (text == to_string(controller)) return controller;
  }
  return std::nullopt;
}

ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts) {
  if (asked != Controller::kAuto) return {asked, "--controller says so"};
  if (!facts.batch_system.empty())
    return {Controller::kMpi, facts.batch_system + " shows an allocation, which mpirun knows"};
  if (facts.mpi_args) return {Controller::kMpi, "--mpi-args is given"};
  if (facts.names_mpirun) return {Controller::kMpi, "HVD_MPIRUN names an mpirun"};
  if (!facts.needs_mpi.empty()) return {Controller::kMpi, facts.needs_mpi};
  if (facts.has_ucx()) return {Controller::kUcx, "UCX is found"};
  return {Controller::kMpi, facts.has_mpirun ? "an mpirun is found, and no UCX"
                                             : "neither an mpirun nor UCX is found"};
}

std::string program_that_needs_mpi(const std::vector<std::string>& command) {
  for (std::size_t i = 0; i < command.size(); ++i) {
    const std::string& word = command[i];
    // Skips arguments without a folder: they are rarely programs, and each would cost a search of
    // PATH.
    if (i > 0 && word.find('/') == std::string::npos) continue;
    const ProgramSearch found = find_program(word);
    if (!found.executable) continue;
    for (const std::string& library : needed_libraries(found.path))
      if (is_of_mpi(library)) return word + " needs " + library;
  }
  return "";
}

bool finds_ucx() {
  if (!kWithUcx) return false;
  const pid_t child = ::fork();
  if (child < 0) return false;
  if (child == 0) {
    const int nowhere = ::open("/dev/null", O_RDWR);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(nowhere, fd);
    ::_exit(::dlopen(kUcxLibrary, RTLD_LAZY | RTLD_LOCAL) != nullptr ? 0 : 1);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace hvd::launcher
