#pragma once

namespace hvd::runtime {

class Runtime;

/// While it lives, an uncaught exception is reported to the other ranks before it ends the process,
/// so that their errors give the cause. The program's own terminate handler runs afterwards. At
/// most one at a time.
class TerminateHandler {
 public:
  /// @param program_has_mpi the program had started MPI itself when it joined
  TerminateHandler(Runtime&, bool program_has_mpi);
  TerminateHandler(const TerminateHandler&) = delete;
  TerminateHandler& operator=(const TerminateHandler&) = delete;
  ~TerminateHandler();
};

/// While it lives, SIGUSR1 makes the runtime print its state, unless the program has a handler of
/// its own for that signal. At most one at a time.
///
/// The handler stays installed afterwards, and then prints that there is no runtime: a signal to
/// all ranks must not kill one that has just called shutdown(). For the same reason a process that
/// a launcher started has the handler as soon as this library is loaded.
class DumpSignal {
 public:
  explicit DumpSignal(Runtime&);
  DumpSignal(const DumpSignal&) = delete;
  DumpSignal& operator=(const DumpSignal&) = delete;
  ~DumpSignal();
};

}  // namespace hvd::runtime
