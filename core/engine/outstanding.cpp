#include "engine/outstanding.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"
#include "negotiation/process_set_table.h"

namespace hvd::runtime {

void Outstanding::add(const OperationPtr& operation) {
  operations_.emplace(control::tensor_key(operation->request.process_set, operation->request.name),
                      operation);
}

OperationPtr Outstanding::take(int process_set, const std::string& name) {
  auto node = operations_.extract(control::tensor_key(process_set, name));
  if (node.empty()) throw Error("a plan names '" + name + "', which is not in flight here");
  return std::move(node.mapped());
}

std::vector<OperationPtr> Outstanding::in_order() const {
  std::vector<OperationPtr> operations;
  for (const auto& [key, operation] : operations_) operations.push_back(operation);
  sort_by_order(operations);
  return operations;
}

void sort_by_order(std::vector<OperationPtr>& operations) {
  std::sort(operations.begin(), operations.end(),
            [](const auto& a, const auto& b) { return a->order < b->order; });
}

}  // namespace hvd::runtime
