#pragma once

#include <gtest/gtest.h>

#include <cstdio>

namespace hvd::testing {

/// Prints only the failures, on ranks other than 0.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s:%d: %s\n", rank_,
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }

 private:
  const int rank_;
};

}  // namespace hvd::testing
