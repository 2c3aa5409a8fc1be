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
/// Common to all. Every rank of the process set calls the same operation with the same name; the
/// calls may come in any order and from any thread. An empty name is numbered, so unnamed calls
/// must come in the same order everywhere. Tensors are dense, on the CPU or this rank's GPU, of
/// dtype uint8, int8, int16, int32, int64, bool, float16, bfloat16, float32 or float64, of any
/// shape and strides, zero elements included; a sum or an average also takes complex ones, and a
/// broadcast any dtype but quantized ones; others are a UsageError. A result is a fresh contiguous
/// tensor.
///
/// @throws UsageError when this call is wrong, NotInitializedError before init(); and when waiting
/// MismatchError (ranks disagree on shape, dtype or options), StalledError, PeerLostError,
/// ShutdownError. Thread-safe. The memory is kept alive until the operation is done; until then do
/// not write an input and do not touch an in-place tensor.
namespace hvd {

struct AllreduceOptions {
  std::string name = {};
  ReduceOp op = ReduceOp::kAverage;
  /// result = op over ranks of (prescale_factor * x), times postscale_factor (divided by the size
  /// for an average).
  double prescale_factor = 1;
  double postscale_factor = 1;
  /// Sends float32 and float64 as 16 bits; the result has the input's dtype. Other dtypes are sent
  /// as they are. An allreduce of float32 multiplies by the prescale factor before it rounds to 16
  /// bits: see hvd::Allreduce::compression.
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
};

struct CollectiveOptions {
  std::string name = {};
  ProcessSet process_set = {};
};

// Out of place. Differentiable, unless it says otherwise, when the tensor requires grad and grad
// mode is on; backward communicates too, so every rank must run it. A named call's backward is
// called "NAME.backward".

/// Reduces over ranks; same shape and dtype as the input. Backward: the same reduction of the
/// gradient. @throws UsageError also for min, max, product and Adasum on a tensor that requires
/// grad.
torch::Tensor allreduce(const torch::Tensor& tensor, const AllreduceOptions& options = {});
/// Concatenates along dimension 0, in rank order; first dimensions may differ, the others must
/// agree. A scalar counts as shape [1]. Backward: this rank's slice of the summed gradient.
torch::Tensor allgather(const torch::Tensor& tensor, const CollectiveOptions& options = {});
/// The root's tensor. `root_rank` is a world rank. Shape and dtype must agree. Backward: the summed
/// gradient at the root, zeros elsewhere.
torch::Tensor broadcast(const torch::Tensor& tensor, int root_rank,
                        const CollectiveOptions& options = {});
/// Reduces over ranks and gives each its share of the rows (dimension 0), in set order: an equal
/// number, the remainder going to the first ranks, one row each. A share may be empty. Sum and
/// average only. Backward: an allgather of the gradient, divided by the size for an average.
/// @throws UsageError also for another op and for a scalar.
torch::Tensor reducescatter(const torch::Tensor& tensor, const AllreduceOptions& options = {});

struct AlltoallResult {
  torch::Tensor output;           ///< what the ranks sent here, in set order, along dimension 0
  torch::Tensor received_splits;  ///< int64, one entry for each rank: how many rows it sent
};
/// Distributes the rows (dimension 0): the first splits[0] to the first rank of the set, and so on.
/// `splits`: a CPU tensor of int32 or int64, one entry for each rank, none negative, that add up to
/// the rows; undefined: equal shares. They may differ between ranks. Backward: the reverse
/// exchange.
/// @throws UsageError also for a scalar, splits that do not fit, or rows that cannot be shared
/// equally.
AlltoallResult alltoall(const torch::Tensor& tensor, const torch::Tensor& splits = {},
                        const CollectiveOptions& options = {});
/// allgather() whose result only the destination gets, a world rank; the others get an undefined
/// tensor. Not differentiable: @throws UsageError also for a tensor that requires grad.
torch::Tensor gather(const torch::Tensor& tensor, int dst_rank,
                     const CollectiveOptions& options = {});
/// allgather() along any dimension, in which sizes may differ between ranks; negative ones count
/// from the last. Every rank passes the same `dim`. Backward: this rank's slice of the summed
/// gradient. @throws UsageError also for a dimension that the tensor does not have.
torch::Tensor all_gather_into_tensor(const torch::Tensor& tensor, std::int64_t dim = 0,
                                     const CollectiveOptions& options = {});
/// allreduce() whose result only the root gets, a world rank; the others get zeros. It moves as
/// much as an allreduce. Backward: the root's gradient on every rank, divided by the size for an
/// average; those of the zeros are not used.
/// @throws UsageError also for min, max, product, Adasum and the bitwise operations on a tensor
/// that requires grad.
torch::Tensor reduce(const torch::Tensor& tensor, int root_rank,
                     const AllreduceOptions& options = {});
/// Shares out the rows (dimension 0) of the root's tensor as reducescatter() does: an equal number
/// to each rank of the set, the remainder to the first ranks, one row each. `root_rank` is a world
/// rank. On the other ranks only the tensor's dtype, device and sizes after the first matter, so
/// that torch::empty({0, 3}) will do. Each row is sent once. Backward: the gathered gradient at the
/// root, zeros elsewhere; the tensors of all ranks require grad then. @throws UsageError also for a
/// scalar.
torch::Tensor scatter(const torch::Tensor& tensor, int root_rank,
                      const CollectiveOptions& options = {});
/// Reduces sparse COO tensors over ranks, by gathering indices and values: the result is coalesced.
/// Sum and average only. Shape and number of sparse dimensions must agree; the number of entries
/// may differ, and be 0. float16 and bfloat16 are added in float32 and rounded once. Not
/// differentiable. @throws UsageError also for a dense tensor, another op, or a tensor that
/// requires grad.
torch::Tensor sparse_allreduce(const torch::Tensor& coo, const AllreduceOptions& options = {});

// In place; they return their argument. Autograd does not see them (the tensor's version is
// increased, so that a backward which needed the old value throws). UsageError for a tensor whose
// elements share memory (expanded).

torch::Tensor allreduce_(torch::Tensor tensor, const AllreduceOptions& options = {});
torch::Tensor broadcast_(torch::Tensor tensor, int root_rank,
                         const CollectiveOptions& options = {});
/// Into the root's tensor; those of the other ranks stay as they are.
torch::Tensor reduce_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options = {});

// Into a tensor of the caller's, which they return: it is dense, contiguous, on the input's device
// and of its dtype, and has the result's shape (else UsageError). It may be the input's memory only
// where the operation has an in-place form: the whole of it for allreduce and broadcast; for
// reducescatter the rows that this rank gets of the input; for allgather the rows of the output
// that are this rank's. Not differentiable: UsageError for an input that requires grad, while grad
// mode is on. As for in-place operations, autograd does not see that the output is written, but for
// its version.
//
// The rows that allgather_into() and alltoall_into() receive are known when all ranks have asked.
// An output of another shape is a UsageError of this rank's when it waits; the other ranks get
// their results.

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

// Asynchronous, and not differentiable: UsageError out of place for a tensor that requires grad,
// while grad mode is on. In-place tensors that are not contiguous, or compressed and of float64,
// get their result at the first wait().

Handle allreduce_async(const torch::Tensor& tensor, const AllreduceOptions& options = {});
Handle allreduce_async_(torch::Tensor tensor, const AllreduceOptions& options = {});
Handle allgather_async(const torch::Tensor& tensor, const CollectiveOptions& options = {});
Handle broadcast_async(const torch::Tensor& tensor, int root_rank,
                       const CollectiveOptions& options = {});
Handle broadcast_async_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options = {});
Handle reducescatter_async(const torch::Tensor& tensor, const AllreduceOptions& options = {});
/// Two results: see Handle::wait_all(). They are the members of AlltoallResult.
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
Handle sparse_allreduce_async(const torch::Tensor& coo, const AllreduceOptions& options = {});

// Grouped: all or nothing, and fused together. Members are named "NAME.0", "NAME.1", ... The number
// of tensors must agree between ranks. The results are in the order of the tensors.

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

}  // namespace hvd
