#pragma once

/// Attributes for Clang's thread safety analysis: which lock or other capability a field or a
/// function needs. test/style/check_thread_safety.py runs the analysis over `core` and `launcher`.
/// The macros are empty for other compilers. See docs/threading.md.
#if defined(__clang__)
#define HVD_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define HVD_THREAD_ANNOTATION(attribute)
#endif

/// On a class: a capability, which one thread at a time can hold. `name` appears in diagnostics.
#define HVD_CAPABILITY(name) HVD_THREAD_ANNOTATION(capability(name))
/// On a class: holds a capability from construction to destruction.
#define HVD_SCOPED_CAPABILITY HVD_THREAD_ANNOTATION(scoped_lockable)
/// On a field: access requires the capability.
#define HVD_GUARDED_BY(capability) HVD_THREAD_ANNOTATION(guarded_by(capability))
/// On a function: the caller must hold the capability.
#define HVD_REQUIRES(...) HVD_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HVD_ACQUIRE(...) HVD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HVD_RELEASE(...) HVD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
/// On a function: the result that means success, and the capability that it then acquires.
#define HVD_TRY_ACQUIRE(...) HVD_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
/// On a function: returns a reference to this capability.
#define HVD_RETURN_CAPABILITY(capability) HVD_THREAD_ANNOTATION(lock_returned(capability))
/// On a function that the analysis cannot follow; a comment there gives the reason.
#define HVD_NO_THREAD_SAFETY_ANALYSIS HVD_THREAD_ANNOTATION(no_thread_safety_analysis)
