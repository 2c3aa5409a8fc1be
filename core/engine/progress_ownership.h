#pragma once

#include "base/mutex.h"

namespace hvd::runtime {

/// The right to drive one engine, as the compiler knows it. Which thread has it is for the Runtime
/// to say (docs/threading.md): nothing of this is left in the program.
class HVD_CAPABILITY("progress ownership") ProgressOwnership {
 public:
  void acquired() const noexcept HVD_ACQUIRE() {}
  void released() const noexcept HVD_RELEASE() {}
};

}  // namespace hvd::runtime
