#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/parameters.h"

namespace hvd::testing {

/// An in-place operation on a vector of floats.
inline Submission float_operation(std::vector<float>& memory, const std::string& name,
                                  OpKind kind = OpKind::kAllreduce) {
  Submission submission;
  submission.name = name;
  submission.parameters = parameters_of(kind);
  submission.input = {reinterpret_cast<std::byte*>(memory.data()),
                      static_cast<std::int64_t>(memory.size()),
                      DataType::kFloat32,
                      {},
                      {static_cast<std::int64_t>(memory.size())}};
  submission.output = submission.input;
  return submission;
}

}  // namespace hvd::testing
