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

/// One task for each collective. All functions check their arguments and throw UsageError. `name`
/// replaces the options' name for members of a group.
namespace hvd::libtorch {

/// Copies the result to the caller's tensor, unless it is already there. @return the target
torch::Tensor write_back(const torch::Tensor& result, const torch::Tensor& target);

/// "NAME.SUFFIX"; an empty name remains empty, since the core numbers unnamed operations.
std::string derived_name(const std::string& name, std::string_view suffix);
/// The name of a group's member with that index.
std::string member_name(const std::string& group, std::size_t index);

/// @throws UsageError unless the caller's output is writable, contiguous, of the input's dtype, on
/// its device and of this shape, in which -1 stands for any size
void check_output(const torch::Tensor& output, const torch::Tensor& input, at::IntArrayRef shape,
                  const Label&);

/// A result whose size is known only after the negotiation. The engine's thread writes it before
/// the operation is done; other threads read it afterwards.
struct GatheredResult {
  torch::Tensor input;
  std::optional<c10::Stream>
      stream;  ///< on a GPU: the stream of the submission, under which the output is allocated
  torch::Tensor output;
  torch::Tensor target;                  ///< the caller's output; undefined: a new tensor
  std::size_t position = 0;              ///< with a target: this rank's position in the process set
  std::vector<std::int64_t> first_dims;  ///< rows from each member
  std::string allocation_error;
  std::string target_error;  ///< why the output is not the target

  TensorView allocate(const OutputSizes& sizes) noexcept;

 private:
  bool takes_target(at::IntArrayRef shape);
};
using GatheredResultPtr = std::shared_ptr<GatheredResult>;

/// @param target tensor for the result, here and below: `tensor` itself (in place), another tensor
/// (the caller's output), or undefined (a new tensor)
OperationTask allreduce_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                             std::string name, const torch::Tensor& target = {});
/// On ranks other than the root the result is zeros, or the unchanged tensor if `target` is
/// `tensor`.
/// @param target a tensor other than `tensor` only on the root
OperationTask reduce_task(const torch::Tensor& tensor, int root_rank,
                          const AllreduceOptions& options, std::string name,
                          const torch::Tensor& target = {});
OperationTask reducescatter_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                                 std::string name, const torch::Tensor& target = {});
OperationTask broadcast_task(const torch::Tensor& tensor, int root_rank,
                             const CollectiveOptions& options, const torch::Tensor& target = {});
OperationTask allgather_task(const torch::Tensor& tensor, const CollectiveOptions& options,
                             std::string name, const GatheredResultPtr& gathered);
/// The result is undefined on ranks other than `dst_rank`.
OperationTask gather_task(const torch::Tensor& tensor, int dst_rank,
                          const CollectiveOptions& options, const GatheredResultPtr& gathered);
OperationTask scatter_task(const torch::Tensor& tensor, int root_rank,
                           const CollectiveOptions& options, std::string name,
                           const GatheredResultPtr& gathered);
/// @param splits undefined: equal shares
OperationTask alltoall_task(const torch::Tensor& tensor, const torch::Tensor& splits,
                            const CollectiveOptions& options, const GatheredResultPtr& gathered);

/// Starts the tasks `make(tensor, name, index)` of all tensors as one group.
template <class MakeTask>
Handle start_each(at::TensorList tensors, const std::string& group, Progress progress,
                  const MakeTask& make) {
  std::vector<OperationTask> tasks;
  tasks.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back(make(tensors[i], member_name(group, i), i));
  }
  return start_group(group, std::move(tasks), progress);
}

}  // namespace hvd::libtorch
