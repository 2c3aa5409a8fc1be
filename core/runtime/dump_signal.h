#pragma once

namespace hvd::runtime {

class Runtime;

/// While it lives, SIGUSR1 makes the runtime print what it is doing, unless the program has a handler of its own for that signal. At
/// most one at a time.
class DumpSignal {
 public:
  explicit DumpSignal(Runtime&);
  DumpSignal(const DumpSignal&) = delete;
  DumpSignal& operator=(const DumpSignal&) = delete;
  ~DumpSignal();

 private:
  bool installed_ = false;
};

}  // namespace hvd::runtime
