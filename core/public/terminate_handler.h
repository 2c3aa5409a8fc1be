#pragma once

namespace hvd::runtime {

class Runtime;

/// While it lives, an uncaught exception is reported to the other ranks before it ends the process,
/// so that they can say why they lost this one. The program's own terminate handler runs
/// afterwards. At most one at a time.
class TerminateHandler {
 public:
  /// @param program_has_mpi the program had started MPI itself when it joined
  TerminateHandler(Runtime&, bool program_has_mpi);
  TerminateHandler(const TerminateHandler&) = delete;
  TerminateHandler& operator=(const TerminateHandler&) = delete;
  ~TerminateHandler();
};

}  // namespace hvd::runtime
