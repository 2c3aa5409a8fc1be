#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/torch/handle.h"
#include "hvd/types.h"

/// Collectives on tensors.
///
/// Every rank of the process set calls the same operation with the same name, in any order and from
/// any thread. Operations with an empty name are numbered, so every rank must make unnamed calls in
/// the same order. Tensors are dense, on the CPU or this rank's GPU, of any shape (zero elements
/// included) and strides, and of dtype uint8, int8, int16, int32, int64, bool, float16, bfloat16,
/// float32 or float64. Sums and averages also take complex tensors; broadcasts take all dtypes
/// except quantized ones. Other tensors are a UsageError. A result is a new contiguous tensor.
///
/// @throws UsageError when this call is wrong, NotInitializedError before init(); and when waiting
/// MismatchError (ranks disagree on shape, dtype or options), StalledError, PeerLostError,
/// ShutdownError. Thread-safe. An operation keeps the memory of its tensors alive. Until it is
/// done, do not write its inputs and do not access in-place tensors.
namespace hvd {

/// @addtogroup exchange
/// @{

/// The options of the reductions: allreduce, reduce, reducescatter and their variants.
struct AllreduceOptions {
  std::string name = {};
  ReduceOp op = ReduceOp::kAverage;
  /// result = postscale_factor * op over ranks of (prescale_factor * x). An average divides by the
  /// number of ranks.
  double prescale_factor = 1;
  double postscale_factor = 1;
  /// Sends float32 and float64 as 16 bits; the result has the input's dtype. Other dtypes are not
  /// compressed. An allreduce of float32 multiplies by the prescale factor before it rounds to 16
  /// bits: see hvd::Allreduce::compression.
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
};

/// The options of the collectives that do not reduce.
struct CollectiveOptions {
  std::string name = {};
  ProcessSet process_set = {};
};

/// @name Out of place
/// These calls are differentiable, with the exceptions below, when the tensor requires
/// grad and grad mode is on. Backward communicates, so every rank must run it. The backward of a
/// call named NAME is the operation "NAME.backward".
/// @{

/// Reduces over ranks. The result has the input's shape and dtype. Backward: the same reduction of
/// the gradient. @throws UsageError also for min, max, product and Adasum on a tensor that requires
/// grad
torch::Tensor allreduce(const torch::Tensor& tensor, const AllreduceOptions& options = {});
/// Concatenates along dimension 0, in rank order. First dimensions may differ, the others must
/// agree. A scalar counts as a tensor of shape [1]. Backward: this rank's slice of the summed
/// gradient.
torch::Tensor allgather(const torch::Tensor& tensor, const CollectiveOptions& options = {});
/// Returns the root's tensor. `root_rank` is a world rank. Shape and dtype must agree. Backward:
/// the summed gradient on the root, zeros on the other ranks.
torch::Tensor broadcast(const torch::Tensor& tensor, int root_rank,
                        const CollectiveOptions& options = {});
/// Reduces over ranks and returns this rank's rows (dimension 0) of the result. The rows are split
/// in set order into equal shares; the first ranks get one row more each if there is a remainder. A
/// share may be empty. Sum and average only. Backward: an allgather of the gradient, divided by the
/// size for an average.
/// @throws UsageError also for another op and for a scalar.
torch::Tensor reducescatter(const torch::Tensor& tensor, const AllreduceOptions& options = {});

/// The result of alltoall().
struct AlltoallResult {
  torch::Tensor output;           ///< the received rows, in set order, along dimension 0
  torch::Tensor received_splits;  ///< int64 of shape [size]: the number of rows from each rank
};
/// Sends the first splits[0] rows (dimension 0) to the first rank of the set, the next splits[1] to
/// the second, and so on. Backward: the reverse exchange.
/// @param splits a CPU tensor of int32 or int64 and shape [size], whose entries are not negative
/// and add up to the number of rows; undefined: equal shares. It may differ between ranks.
/// @throws UsageError also for a scalar, for splits that do not fit, and without splits for rows
/// that the size does not divide
AlltoallResult alltoall(const torch::Tensor& tensor, const torch::Tensor& splits = {},
                        const CollectiveOptions& options = {});
/// Like allgather(), but only the destination, a world rank, gets the result. The others get an
/// undefined tensor. Not differentiable. @throws UsageError also for a tensor that requires grad
torch::Tensor gather(const torch::Tensor& tensor, int dst_rank,
                     const CollectiveOptions& options = {});
/// Like allgather(), but along any dimension. Sizes of that dimension may differ between ranks.
/// Backward: this rank's slice of the summed gradient.
/// @param dim the same on every rank; a negative number counts from the last dimension
/// @throws UsageError also for a dimension that the tensor does not have
torch::Tensor all_gather_into_tensor(const torch::Tensor& tensor, std::int64_t dim = 0,
                                     const CollectiveOptions& options = {});
/// An allreduce() of which only the root, a world rank, gets the result; the others get zeros.
/// Sends as many bytes as an allreduce. Backward: the root's gradient on every rank, divided by the
/// size for an average; the gradients of the zeros are not used.
/// @throws UsageError also for min, max, product, Adasum and the bitwise operations on a tensor
/// that requires grad.
torch::Tensor reduce(const torch::Tensor& tensor, int root_rank,
                     const AllreduceOptions& options = {});
/// Returns this rank's rows (dimension 0) of the root's tensor, split as reducescatter() splits
/// them. `root_rank` is a world rank. The other ranks' tensors need the root's dtype, device and
/// sizes after the first dimension; their rows are not used, so torch::empty({0, 3}) suffices. Each
/// row is sent once. Backward: the gathered gradient on the root, zeros on the other ranks. If one
/// rank's tensor requires grad, all ranks' must. @throws UsageError also for a scalar
torch::Tensor scatter(const torch::Tensor& tensor, int root_rank,
                      const CollectiveOptions& options = {});
/// Reduces sparse COO tensors over ranks, by gathering indices and values. The result is coalesced.
/// Sum and average only. Shape and number of sparse dimensions must agree; the number of entries
/// may differ, and be 0. float16 and bfloat16 are added in float32 and rounded once. Not
/// differentiable. @throws UsageError also for a dense tensor, another op, or a tensor that
/// requires grad
torch::Tensor sparse_allreduce(const torch::Tensor& coo, const AllreduceOptions& options = {});

/// @}

/// @name In place
/// These calls return their argument. Autograd does not record them, but they increase the
/// tensor's version, so that a backward that needs the old value throws. A tensor whose elements
/// share memory (expanded) is a UsageError.
/// @{

torch::Tensor allreduce_(torch::Tensor tensor, const AllreduceOptions& options = {});
torch::Tensor broadcast_(torch::Tensor tensor, int root_rank,
                         const CollectiveOptions& options = {});
/// Writes the result to the root's tensor. The other ranks' tensors do not change.
torch::Tensor reduce_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options = {});

/// @}

/// @name Into a tensor of the caller
/// These calls return `output`. It must be dense and contiguous, and have the result's shape and
/// the input's dtype and device; otherwise they throw UsageError. It must not share memory with the
/// input, with three exceptions. For allreduce, reduce and broadcast it may be the input. For
/// reducescatter it may be the rows of the input that this rank gets. For allgather the input may
/// be this rank's rows of the output. reduce_into() and gather_into() use only the output of the
/// root or destination; on the other ranks `output` may be undefined and does not change. Not
/// differentiable: an input that requires grad while grad mode is on is a UsageError. Autograd does
/// not record the write, but the output's version increases.
///
/// The number of rows that allgather_into(), alltoall_into() and gather_into() receive is known
/// only when all ranks have made the call. If the output has another shape, this rank's wait throws
/// a UsageError; the other ranks get their results.
/// @{

torch::Tensor allreduce_into(torch::Tensor output, const torch::Tensor& input,
                             const AllreduceOptions& options = {});
torch::Tensor allgather_into(torch::Tensor output, const torch::Tensor& input,
                             const CollectiveOptions& options = {});
torch::Tensor reducescatter_into(torch::Tensor output, const torch::Tensor& input,
                                 const AllreduceOptions& options = {});
torch::Tensor broadcast_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                             const CollectiveOptions& options = {});
torch::Tensor alltoall_into(torch::Tensor output, const torch::Tensor& input,
                            const torch::Tensor& splits = {},
                            const CollectiveOptions& options = {});
torch::Tensor scatter_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                           const CollectiveOptions& options = {});
torch::Tensor reduce_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const AllreduceOptions& options = {});
torch::Tensor gather_into(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                          const CollectiveOptions& options = {});

/// @}

/// @name Asynchronous
/// Not differentiable: out of place, a tensor that requires grad while grad mode is on
/// is a UsageError. In-place tensors that are not contiguous, or that are compressed and of dtype
/// float64, get their result at the first wait().
/// @{

Handle allreduce_async(const torch::Tensor& tensor, const AllreduceOptions& options = {});
Handle allreduce_async_(torch::Tensor tensor, const AllreduceOptions& options = {});
Handle allgather_async(const torch::Tensor& tensor, const CollectiveOptions& options = {});
Handle broadcast_async(const torch::Tensor& tensor, int root_rank,
                       const CollectiveOptions& options = {});
Handle broadcast_async_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options = {});
Handle reducescatter_async(const torch::Tensor& tensor, const AllreduceOptions& options = {});
/// The handle has two results, the members of AlltoallResult: use Handle::wait_all().
Handle alltoall_async(const torch::Tensor& tensor, const torch::Tensor& splits = {},
                      const CollectiveOptions& options = {});
Handle gather_async(const torch::Tensor& tensor, int dst_rank,
                    const CollectiveOptions& options = {});
Handle reduce_async(const torch::Tensor& tensor, int root_rank,
                    const AllreduceOptions& options = {});
Handle reduce_async_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options = {});
Handle scatter_async(const torch::Tensor& tensor, int root_rank,
                     const CollectiveOptions& options = {});
Handle allreduce_into_async(torch::Tensor output, const torch::Tensor& input,
                            const AllreduceOptions& options = {});
Handle allgather_into_async(torch::Tensor output, const torch::Tensor& input,
                            const CollectiveOptions& options = {});
Handle reducescatter_into_async(torch::Tensor output, const torch::Tensor& input,
                                const AllreduceOptions& options = {});
Handle broadcast_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                            const CollectiveOptions& options = {});
Handle alltoall_into_async(torch::Tensor output, const torch::Tensor& input,
                           const torch::Tensor& splits = {}, const CollectiveOptions& options = {});
Handle scatter_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const CollectiveOptions& options = {});
Handle reduce_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                         const AllreduceOptions& options = {});
Handle gather_into_async(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                         const CollectiveOptions& options = {});
Handle sparse_allreduce_async(const torch::Tensor& coo, const AllreduceOptions& options = {});

/// @}

/// @name Grouped
/// The operations of a group succeed or fail together, and are fused. They are named
/// "NAME.0", "NAME.1", ... The number of tensors must agree between ranks. The results are in the
/// order of the tensors.
/// @{

std::vector<torch::Tensor> grouped_allreduce(at::TensorList tensors,
                                             const AllreduceOptions& options = {});
void grouped_allreduce_(at::TensorList tensors, const AllreduceOptions& options = {});
std::vector<torch::Tensor> grouped_allgather(at::TensorList tensors,
                                             const CollectiveOptions& options = {});
std::vector<torch::Tensor> grouped_reducescatter(at::TensorList tensors,
                                                 const AllreduceOptions& options = {});
std::vector<torch::Tensor> grouped_reduce(at::TensorList tensors, int root_rank,
                                          const AllreduceOptions& options = {});
Handle grouped_reduce_async(at::TensorList tensors, int root_rank,
                            const AllreduceOptions& options = {});
Handle grouped_allreduce_async(at::TensorList tensors, const AllreduceOptions& options = {});
Handle grouped_allreduce_async_(at::TensorList tensors, const AllreduceOptions& options = {});
Handle grouped_allgather_async(at::TensorList tensors, const CollectiveOptions& options = {});
Handle grouped_reducescatter_async(at::TensorList tensors, const AllreduceOptions& options = {});
/// Scatters each tensor like scatter(). Every rank passes the same number of tensors.
std::vector<torch::Tensor> grouped_scatter(at::TensorList tensors, int root_rank,
                                           const CollectiveOptions& options = {});
Handle grouped_scatter_async(at::TensorList tensors, int root_rank,
                             const CollectiveOptions& options = {});

/// @}

/// @}

}  // namespace hvd
