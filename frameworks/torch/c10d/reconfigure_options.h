#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#ifndef C10D_BACKEND_HAS_RECONFIGURE
namespace c10d {
/// Defined as in torch 2.14, for tests with an earlier version.
struct ReconfigureOptions {
  std::int64_t uuid = 0;
  std::variant<std::unordered_set<std::string>, std::vector<std::string>> handles = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::unordered_map<std::string, std::string> hints = {};
};
}  // namespace c10d
#endif
