#include "command/controller.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kUcxLibrary = "libucp.so.0";

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

ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts,
                                   bool prefer_mpi) {
  if (asked != Controller::kAuto) return {asked, "--controller says so"};
  if (!facts.batch_system.empty())
    return {Controller::kMpi, facts.batch_system + " shows an allocation, which mpirun knows"};
  if (facts.mpi_args) return {Controller::kMpi, "--mpi-args is given"};
  if (facts.names_mpirun) return {Controller::kMpi, "HVD_MPIRUN names an mpirun"};
  if (prefer_mpi && facts.has_mpirun) return {Controller::kMpi, "an mpirun is found"};
  if (facts.has_ucx())
    return {Controller::kUcx, facts.has_mpirun ? "UCX is found" : "UCX is found, and no mpirun"};
  return {Controller::kMpi, facts.has_mpirun ? "an mpirun is found, and no UCX"
                                             : "neither an mpirun nor UCX is found"};
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
