#pragma once

/// Clang's thread safety analysis: which lock, or other right, a field or a function needs. The
/// pass over `core` and `launcher` is test/style/check_thread_safety.py; other compilers see
/// nothing of it. See docs/threading.md.
#if defined(__clang__)
#define HVD_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define HVD_THREAD_ANNOTATION(attribute)
#endif

/// Of a class: what one thread at a time can hold. `name` is for the compiler's messages.
#define HVD_CAPABILITY(name) HVD_THREAD_ANNOTATION(capability(name))
/// Of a class: holds a capability from construction to destruction.
#define HVD_SCOPED_CAPABILITY HVD_THREAD_ANNOTATION(scoped_lockable)
/// Of a field.
#define HVD_GUARDED_BY(capability) HVD_THREAD_ANNOTATION(guarded_by(capability))
/// Of a function: the caller holds it.
#define HVD_REQUIRES(...) HVD_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HVD_ACQUIRE(...) HVD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HVD_RELEASE(...) HVD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
/// Of a function: (the result that means that it was acquired, what).
#define HVD_TRY_ACQUIRE(...) HVD_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
/// Of a function: it returns a reference to this capability.
#define HVD_RETURN_CAPABILITY(capability) HVD_THREAD_ANNOTATION(lock_returned(capability))
/// Of a function that the analysis cannot follow; a comment says why it is right.
#define HVD_NO_THREAD_SAFETY_ANALYSIS HVD_THREAD_ANNOTATION(no_thread_safety_analysis)
