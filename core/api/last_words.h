#pragma once

namespace hvd::runtime {

class Runtime;

/// While it lives, an exception that nobody catches is told to the other ranks before it ends the
/// process, so that they can say why they lost this one. The program's own terminate handler runs
/// afterwards. At most one at a time.
class LastWords {
 public:
  explicit LastWords(Runtime&);
  LastWords(const LastWords&) = delete;
  LastWords& operator=(const LastWords&) = delete;
  ~LastWords();
};

}  // namespace hvd::runtime
