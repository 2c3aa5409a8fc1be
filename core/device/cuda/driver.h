#pragma once

#include <string>

struct CUctx_st;

namespace hvd::device {

/// The few functions of the driver that the runtime library has no counterpart for, found when the
/// program runs: a program with CUDA support starts on hosts without a driver. Thread-safe.
class Driver {
 public:
  /// The process's; null when there is no driver.
  static const Driver* get();

  /// The device's primary context, made and kept for as long as the process lives. @throws Error
  CUctx_st* primary_context(int device) const;
  /// Makes the context the calling thread's until pop(), and lets the thread do meanwhile what it
  /// may not while a stream is being captured into a graph elsewhere: Note [Captures]. Nests.
  /// @throws Error
  void push(CUctx_st* context) const;
  void pop() const noexcept;

 private:
  Driver() = default;
  void check(int result, const char* call) const;

  int (*init_)(unsigned) = nullptr;
  int (*device_get_)(int*, int) = nullptr;
  int (*retain_)(CUctx_st**, int) = nullptr;
  int (*push_)(CUctx_st*) = nullptr;
  int (*pop_)(CUctx_st**) = nullptr;
  int (*exchange_capture_mode_)(int*) = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
};

}  // namespace hvd::device
