#pragma once

#include <string_view>

namespace hvd::runtime {

class Runtime;

/// Reports to hvdrun and then to the other ranks that this process is about to end, so that their
/// errors name the cause. Waits for at most 0.5 s. No effect after the runtime has failed.
void report_failure(Runtime&, std::string_view cause) noexcept;

/// As long as it exists, reports an uncaught exception to the other ranks before it ends the
/// process, so that their errors name the cause. The program's own terminate handler runs
/// afterwards. At most one object of this class may exist at a time.
class TerminateHandler {
 public:
  /// @param program_has_mpi whether the program itself had initialised MPI before it joined the job
  TerminateHandler(Runtime&, bool program_has_mpi);
  TerminateHandler(const TerminateHandler&) = delete;
  TerminateHandler& operator=(const TerminateHandler&) = delete;
  ~TerminateHandler();
};

/// As long as it exists, SIGUSR1 makes the runtime print its state, unless the program has its own
/// handler for that signal. At most one object of this class may exist at a time.
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
