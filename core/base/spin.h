#pragma once

namespace hvd {

/// Call this between two checks in a loop that waits for another core.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hvd
