#pragma once

/// Checks a condition that the surrounding code relies on, mostly a precondition. With
/// HVD_CONTRACTS on (debug and sanitizer builds), a violation ends the program through
/// std::terminate() with file, line, condition and text as the cause, so that the other ranks and
/// hvdrun receive it. In other builds the condition is not evaluated.
///
///    HVD_EXPECT(holds(slot), "the slot is in use");
///
/// Do not use it for mistakes of a user or a peer, which are errors in every build. Do not use it
/// while holding the lock of SubmissionQueue, because notifying the other ranks takes that lock.
#if HVD_CONTRACTS
#define HVD_EXPECT(condition, expected) \
  (static_cast<bool>(condition)         \
       ? static_cast<void>(0)           \
       : ::hvd::expectation_failed(__FILE__, __LINE__, #condition, expected))
#else
#define HVD_EXPECT(condition, expected) static_cast<void>(sizeof(static_cast<bool>(condition)))
#endif

namespace hvd {

[[noreturn]] void expectation_failed(const char* file, int line, const char* condition,
                                     const char* expected) noexcept;

}  // namespace hvd
