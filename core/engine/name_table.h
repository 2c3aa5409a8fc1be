#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "execution/operation_state.h"

namespace hvd::runtime {

/// An operation as its rank knows it: by process set and name.
struct NamedOperation {
  int process_set = 0;
  std::string name = {};
  OperationPtr last = {};  ///< the state of its last use, if it may be used again
  bool in_flight = false;
};

/// The names in flight, and the states of operations that come again and again, which are used
/// again with them. Not thread-safe.
class NameTable {
 public:
  /// Null when nothing is known by that name.
  NamedOperation* find(int process_set, std::string_view name) noexcept;
  /// From now on in flight. Null when it was already.
  NamedOperation* claim(int process_set, const std::string& name);
  /// No longer in flight. @param remember whether it may come again: its state is kept
  void release(NamedOperation&, bool remember);

 private:
  using Key = std::pair<int, std::string_view>;  // of the name in the value
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::string_view>()(key.second) ^
             (static_cast<std::size_t>(key.first) * 0x9E3779B97F4A7C15u);
    }
  };
  std::unordered_map<Key, std::unique_ptr<NamedOperation>, Hash> entries_;
};

}  // namespace hvd::runtime
