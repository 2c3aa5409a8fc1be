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

/// A tensor of the caller's for the result. @throws UsageError unless it can be written, is
/// contiguous, of the input's dtype and on its device, and of this shape, in which -1 is any size
void check_output(const torch::Tensor& output, const torch::Tensor& input, at::IntArrayRef shape,
                  const Label&);

/// A result whose size negotiation tells. Written by the engine's thread before the operation is
/// done, read after.
struct Gathered {
  torch::Tensor input;
  std::optional<c10::Stream>
      stream;  ///< GPU: of the submission, under which the output is allocated
  torch::Tensor output;
  torch::Tensor target;                  ///< the caller's, for the output; undefined: a fresh one
  std::size_t position = 0;              ///< with a target: of this rank in the process set
  std::vector<std::int64_t> first_dims;  ///< rows from each member
  std::string allocation_error;
  std::string target_error;  ///< why the output is not the target

  TensorView allocate(const OutputSizes& sizes) noexcept;

 private:
  bool takes_target(at::IntArrayRef shape);
};
using GatheredPtr = std::shared_ptr<Gathered>;

/// `into`, here and below: a tensor of the caller's for the result; undefined: a fresh one.
Task allreduce_task(const torch::Tensor& tensor, const AllreduceOptions& options, std::string name,
                    Place place, const torch::Tensor& into = {});
/// Zeros elsewhere than at the root; in place, there the tensor as it was.
Task reduce_task(const torch::Tensor& tensor, int root_rank, const AllreduceOptions& options,
                 std::string name, Place place);
Task reducescatter_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                        std::string name, const torch::Tensor& into = {});
Task broadcast_task(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options,
                    Place place, const torch::Tensor& into = {});
Task allgather_task(const torch::Tensor& tensor, const CollectiveOptions& options, std::string name,
                    const GatheredPtr& gathered);
/// Undefined but at the destination.
Task gather_task(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options,
                 const GatheredPtr& gathered);
Task scatter_task(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options,
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
