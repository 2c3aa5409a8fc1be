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

/// While it lives, SIGUSR1 makes the runtime print what it is doing, unless the program has a
/// handler of its own for that signal. At most one at a time.
///
/// The handler stays afterwards, and says that there is no runtime: whoever asks all ranks at once
/// must not kill one that has just called shutdown(). For the same reason a process that a launcher
/// started has it from the moment this library is loaded.
class DumpSignal {
 public:
  explicit DumpSignal(Runtime&);
  DumpSignal(const DumpSignal&) = delete;
  DumpSignal& operator=(const DumpSignal&) = delete;
  ~DumpSignal();
};

}  // namespace hvd::runtime
