#pragma once

#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "c10d/work.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// Which thread drives an operation of c10d: the caller if it waits immediately.
inline Progress progress_of(bool asynchronous) noexcept {
  return asynchronous ? Progress::kBackground : Progress::kCaller;
}

/// Starts the operation of a call. The calls of a group are one sequence, so ranks that make
/// different calls get MismatchError. @param asynchronous see progress_of()
/// @throws c10::DistBackendError when the job has failed
inline Handle start_call(OperationTask task, bool asynchronous) {
  task.submission.in_sequence = true;
  return with_torch_errors([&] { return start(std::move(task), progress_of(asynchronous)); });
}

/// start_call() of a group with the tasks `make(tensor, index)` of all tensors.
template <class MakeTask>
Handle start_coalesced(at::TensorList tensors, bool asynchronous, const MakeTask& make) {
  std::vector<OperationTask> tasks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back(make(tensors[i], i));
    tasks.back().submission.in_sequence = true;
  }
  return with_torch_errors(
      [&] { return start_group({}, std::move(tasks), progress_of(asynchronous)); });
}

/// The only tensor of a call. The lists of c10d's interface have one entry for each device.
/// @throws UsageError for a list with another number of entries
template <class T>
T& only_one(std::vector<T>& list, const char* call) {
  if (list.size() == 1) return list.front();
  throw UsageError(text("C10dBackend: ", call,
                        ": expected one tensor, or one list of tensors, got ", list.size(),
                        "; each rank has one device"));
}

/// @throws UsageError unless there is one tensor for each rank
inline void expect_one_for_each_rank(std::size_t tensors, int ranks, const char* call) {
  if (tensors == static_cast<std::size_t>(ranks)) return;
  throw UsageError(text("C10dBackend: ", call, ": expected ", ranks,
                        " tensors, one for each rank of the group, got ", tensors));
}

}  // namespace hvd::libtorch
