#pragma once

namespace hvd::runtime {

class Runtime;

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
