#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace hvd::launcher {

/// What starts the ranks, and what they send each other messages with.
enum class Controller {
  kAuto,
  kMpi,  ///< mpirun
  kUcx,  ///< hvdrun itself, and a remote shell
};
std::string_view to_string(Controller controller);
std::optional<Controller> parse_controller(std::string_view text);

/// Where both are there and nothing else decides, MPI is taken. UCX is what a job without an
/// allocation is to take in the end; this line is all that it takes.
inline constexpr bool kPreferMpi = true;

/// What the choice depends on.
struct ControllerFacts {
  std::string batch_system = {};  ///< the variable that shows an allocation; empty: there is none
  bool mpi_args = false;          ///< --mpi-args is given
  bool names_mpirun = false;      ///< HVD_MPIRUN is set
  bool has_mpirun = false;
  std::function<bool()> has_ucx = [] { return false; };  ///< asked only where it matters
};

struct ControllerChoice {
  Controller controller = Controller::kMpi;
  std::string reason = {};
};

/// Pure. Where neither is there: MPI, whose error says what to install.
ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts,
                                   bool prefer_mpi = kPreferMpi);

/// hvd was built with UCX, and its library can be loaded here. Looks in a process of its own, as
/// UCX does much when it is loaded.
bool finds_ucx();

}  // namespace hvd::launcher
