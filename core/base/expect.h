#pragma once

/// What the code around it relies on, mostly a precondition. Where HVD_CONTRACTS is on (debug and
/// sanitizer builds), a condition that does not hold ends the program through std::terminate(),
/// with file, line, condition and text as the cause, so that the other ranks and hvdrun are told.
/// Elsewhere nothing is evaluated.
///
///    HVD_EXPECT(holds(slot), "the slot is in use");
///
/// Not for what a user or a peer may get wrong: that is an error, in every build. Not while a lock
/// of EngineFront is held, which telling the others takes.
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
