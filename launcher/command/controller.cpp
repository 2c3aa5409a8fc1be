#include "command/controller.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/needed_libraries.h"
#include "command/probes.h"
#include "system/process.h"

namespace hvd::launcher {
namespace {

constexpr std::array<std::string_view, 3> kControllerNames = {"auto", "mpi", "ucx"};

/// Whether the library belongs to MPI, such as libmpi.so.40, libmpi_cxx.so.40, libmpi_mpifh.so.40
/// and libmpich.so.12, but not libmpir.so.23.
bool is_of_mpi(std::string_view library) {
  return library.starts_with("libmpi.") || library.starts_with("libmpi_") ||
         library.starts_with("libmpich");
}

}  // namespace

std::string_view to_string(Controller controller) {
  return kControllerNames[static_cast<std::size_t>(controller)];
}

std::optional<Controller> parse_controller(std::string_view name) {
  const auto found = std::find(kControllerNames.begin(), kControllerNames.end(), name);
  if (found == kControllerNames.end()) return std::nullopt;
  return static_cast<Controller>(found - kControllerNames.begin());
}

ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts) {
  if (asked != Controller::kAuto) return {asked, "--controller is given"};
  if (!facts.batch_system.empty())
    return {Controller::kMpi, facts.batch_system + " shows an allocation; mpirun gets its hosts"};
  if (facts.mpi_args) return {Controller::kMpi, "--mpi-args is given"};
  if (facts.names_mpirun) return {Controller::kMpi, "HVD_MPIRUN names an mpirun"};
  if (!facts.needs_mpi.empty()) return {Controller::kMpi, facts.needs_mpi};
  const std::string problem = facts.ucx_problem();
  if (problem.empty()) return {Controller::kUcx, "UCX is found"};
  return {Controller::kMpi,
          problem + (facts.has_mpirun ? "; an mpirun is found" : ", and no mpirun is found")};
}

std::string program_that_needs_mpi(const std::vector<std::string>& command) {
  for (std::size_t i = 0; i < command.size(); ++i) {
    const std::string& word = command[i];
    // Skips arguments without a slash: they are rarely programs, and each would cost a search of
    // PATH.
    if (i > 0 && word.find('/') == std::string::npos) continue;
    const ProgramSearch found = find_program(word);
    if (!found.executable) continue;
    for (const std::string& library : needed_libraries(found.path))
      if (is_of_mpi(library)) return word + " needs " + library;
  }
  return "";
}

bool finds_ucx() { return ucx_problem().empty(); }

}  // namespace hvd::launcher
