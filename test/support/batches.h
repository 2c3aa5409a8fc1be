#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/operations.h"
#include "negotiation/process_set_table.h"

/// Agreed batches and their operations, for tests of executors and stagings.
namespace hvd::testing {

inline wire::Request float_request(const std::string& name, std::int64_t count,
                                   OpKind kind = OpKind::kAllreduce) {
  wire::Request asked;
  asked.name = name;
  asked.kind = kind;
  asked.shape = {count};
  return asked;
}

/// The batch of these requests on a process set of `ranks` ranks.
inline control::AgreedBatch agreed_batch(const std::vector<wire::Request>& requests, int ranks) {
  control::AgreedBatch agreed;
  for (const wire::Request& one : requests) agreed.operations.push_back({one});
  agreed.members = control::ProcessSetTable(ranks).members(0);
  return agreed;
}

/// An operation on this memory, in place.
inline runtime::OperationPtr float_state(const wire::Request& asked, std::vector<float>& memory) {
  Submission submission;
  submission.name = asked.name;
  const auto count = static_cast<std::int64_t>(memory.size());
  submission.input = {
      reinterpret_cast<std::byte*>(memory.data()), count, DataType::kFloat32, {}, {count}};
  submission.output = submission.input;
  return runtime::OperationPtr(new runtime::OperationState(submission, asked, {}, {}));
}

}  // namespace hvd::testing
