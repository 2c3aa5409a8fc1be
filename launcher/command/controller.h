#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// How the ranks are started, and the carrier of their messages.
enum class Controller {
  kAuto,
  kMpi,  ///< mpirun
  kUcx,  ///< hvdrun itself, and a remote shell
};
std::string_view to_string(Controller controller);
std::optional<Controller> parse_controller(std::string_view name);

/// The facts that the choice depends on.
struct ControllerFacts {
  std::string batch_system = {};  ///< the variable that shows an allocation; empty: no allocation
  bool mpi_args = false;          ///< --mpi-args is given
  bool names_mpirun = false;      ///< HVD_MPIRUN is set
  std::string needs_mpi = {};     ///< the result of program_that_needs_mpi()
  bool has_mpirun = false;
  /// The result of ucx_problem(). Called only if it decides.
  std::function<std::string()> ucx_problem = [] { return std::string("UCX is not found"); };
};

struct ControllerChoice {
  Controller controller = Controller::kMpi;
  std::string reason = {};
};

/// Chooses how to start the ranks, with the reason. If neither way is available, chooses MPI,
/// because the error for a missing mpirun names the package to install. Pure.
ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts);

/// Describes a program that is linked with MPI, such as "./solver needs libmpi.so.40"; empty if
/// there is no such program. The program calls MPI itself, so without mpirun each of its ranks
/// would form a separate job. `command` is the program and its arguments; each argument may be a
/// program too (numactl ./solver).
std::string program_that_needs_mpi(const std::vector<std::string>& command);

/// Whether ucx_problem() finds no problem.
bool finds_ucx();

}  // namespace hvd::launcher
