#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/operations.h"
#include "tensors/tensor_adapter.h"

/// One submission for each collective. All check their arguments and throw UsageError; `name` is
/// used instead of the options' where a group names its members.
namespace hvd::libtorch {

/// What is left to do in place: the result goes where the caller's tensor is, unless it is there.
/// @return the target
torch::Tensor write_back(const torch::Tensor& result, const torch::Tensor& target);

/// "NAME.SUFFIX". What is unnamed stays unnamed: the core numbers it.
std::string derived_name(const std::string& name, std::string_view suffix);
/// Of the index-th member of a group.
std::string member_name(const std::string& group, std::size_t index);

/// Whether the result goes into a fresh tensor or into the input.
enum class Place { kOut, kIn };

/// A result whose size negotiation tells. Written by the engine's thread before the operation is
/// done, read after.
struct Gathered {
  torch::Tensor input;
  std::optional<c10::Stream>
      stream;  ///< GPU: of the submission, under which the output is allocated
  torch::Tensor output;
  std::vector<std::int64_t> first_dims;  ///< rows from each member
  std::string allocation_error;

  TensorView allocate(const OutputSizes& sizes) noexcept;
};
using GatheredPtr = std::shared_ptr<Gathered>;

Task allreduce_task(const torch::Tensor& tensor, const AllreduceOptions& options, std::string name,
                    Place place);
Task reducescatter_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                        std::string name);
Task broadcast_task(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options,
                    Place place);
Task allgather_task(const torch::Tensor& tensor, const CollectiveOptions& options, std::string name,
                    const GatheredPtr& gathered);
/// Undefined but at the destination.
Task gather_task(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options,
                 const GatheredPtr& gathered);
/// Undefined `splits`: equal ones.
Task alltoall_task(const torch::Tensor& tensor, const torch::Tensor& splits,
                   const CollectiveOptions& options, const GatheredPtr& gathered);

/// Starts `make(tensor, name, index)` of each tensor as one group.
template <class MakeTask>
Handle start_each(at::TensorList tensors, const std::string& group, Progress progress,
                  const MakeTask& make) {
  std::vector<Task> tasks;
  tasks.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back(make(tensors[i], member_name(group, i), i));
  }
  return start_group(group, std::move(tasks), progress);
}

}  // namespace hvd::libtorch
