#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation_state.h"

namespace hvd::runtime {

/// The operations of a rank that wait for a plan, by process set and name.
///
/// Not thread-safe: the thread that drives the engine.
class Outstanding {
 public:
  bool empty() const noexcept { return operations_.empty(); }
  /// Nothing when it is there already.
  void add(const OperationPtr&);
  /// @throws hvd::Error when there is none
  OperationPtr take(int process_set, const std::string& name);
  /// In the order in which they were begun.
  std::vector<OperationPtr> in_order() const;
  void clear() noexcept { operations_.clear(); }

 private:
  std::unordered_map<std::string, OperationPtr> operations_;
};

/// In the order in which they were begun.
void sort_by_order(std::vector<OperationPtr>&);

}  // namespace hvd::runtime
