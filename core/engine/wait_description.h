#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/expect.h"
#include "engine/operations.h"

namespace hvd::runtime {

/// A text about what an operation waits for. A thread requests it, and the engine writes it, once.
///
///   open --write()--> written
///
/// Thread-safe: one thread writes, any thread reads.
class WaitDescription {
 public:
  /// @param until deadline at which the engine writes the text even if other ranks have not replied
  WaitDescription(OperationPtr operation, TimePoint until)
      : operation_(std::move(operation)), until_(until) {}

  const OperationPtr& operation() const noexcept { return operation_; }
  TimePoint until() const noexcept { return until_; }
  bool written() const noexcept { return written_.load(std::memory_order_acquire); }
  /// @pre written()
  const std::string& text() const noexcept {
    HVD_EXPECT(written(), "the engine has written the text");
    return text_;
  }
  /// Engine only. @pre !written()
  void write(std::string text) {
    HVD_EXPECT(!written(), "the engine writes once");
    text_ = std::move(text);
    written_.store(true, std::memory_order_release);
  }

 private:
  const OperationPtr operation_;
  const TimePoint until_;
  std::string text_;
  std::atomic<bool> written_{false};
};

}  // namespace hvd::runtime
