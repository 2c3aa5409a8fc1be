#pragma once

#include <utility>
#include <vector>

#include "engine/runtime.h"
#include "support/float_operation.h"

namespace hvd::testing {

inline Operation submit_one(runtime::Runtime& runtime, Submission submission,
                            Progress progress = Progress::kBackground) {
  std::vector<Submission> one;
  one.push_back(std::move(submission));
  return runtime.submit(std::move(one), progress).front();
}

inline Submission join_operation() { return {.parameters = Join{}}; }

}  // namespace hvd::testing
