#pragma once

#include <string>

namespace hvd::control {

/// What tells an operation from all others of the job: process sets have names of their own.
inline std::string tensor_key(int process_set, const std::string& name) {
  return std::to_string(process_set) + '/' + name;
}

}  // namespace hvd::control
