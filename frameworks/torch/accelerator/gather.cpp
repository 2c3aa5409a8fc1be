#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "accelerator/core.h"
#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd {
namespace {

/// The rows of all ranks in the order of the loader's samples, without those of repeated samples.
/// @param gathered the rows of all ranks, in rank order  @param share rows per sample
torch::Tensor in_loader_order(const torch::Tensor& gathered, const libtorch::BatchPlace& place,
                              std::size_t share) {
  const std::size_t samples =
      std::accumulate(place.sizes.begin(), place.sizes.end(), std::size_t{0});
  const std::size_t most = *std::max_element(place.sizes.begin(), place.sizes.end());
  std::vector<std::size_t> first(place.ranks);  // index of each rank's first sample
  std::exclusive_scan(place.sizes.begin(), place.sizes.end(), first.begin(), std::size_t{0});
  std::vector<std::int64_t> rows;
  rows.reserve(samples * share);
  // Sample i of rank r is number i * ranks + r of the ranks' batch.
  for (std::size_t i = 0; i < most; ++i) {
    for (std::size_t rank = 0; rank < place.ranks; ++rank) {
      if (i >= place.sizes[rank] || i * place.ranks + rank >= place.samples_left) continue;
      for (std::size_t row = 0; row < share; ++row)
        rows.push_back(static_cast<std::int64_t>((first[rank] + i) * share + row));
    }
  }
  return gathered.index_select(0, torch::tensor(rows, torch::kInt64).to(gathered.device()));
}

}  // namespace

torch::Tensor Accelerator::gather_one(const torch::Tensor& tensor) {
  if (!tensor.defined())
    throw UsageError("Accelerator::gather: the tensor is undefined; expected a tensor");
  const torch::Tensor own = tensor.detach();
  return allgather(own.dim() == 0 ? own.unsqueeze(0) : own.contiguous(),
                   {.name = "accelerator.gather"});
}

torch::Tensor Accelerator::gather_samples(const torch::Tensor& tensor) const {
  const libtorch::BatchPlace* const place = core_->running->place();
  torch::Tensor gathered = gather_one(tensor);
  if (place == nullptr || tensor.dim() == 0) return gathered;
  const std::size_t own = place->sizes[place->rank];
  const auto rows = static_cast<std::size_t>(tensor.size(0));
  if (own == 0 || rows % own != 0) {
    throw UsageError(text("Accelerator::gather_for_metrics: the tensor has ", rows,
                          " rows and the batch ", own,
                          " samples; expected a multiple of the samples: use gather() for tensors "
                          "that do not belong to the samples of the batch"));
  }
  const bool in_order = place->ranks == 1 && own <= place->samples_left;
  return in_order ? gathered : in_loader_order(gathered, *place, rows / own);
}

std::vector<torch::Tensor> Accelerator::gather(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> gathered;
  for (const torch::Tensor& tensor : tensors) gathered.push_back(gather_one(tensor));
  return gathered;
}

std::vector<torch::Tensor> Accelerator::gather_for_metrics(
    const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> gathered;
  for (const torch::Tensor& tensor : tensors) gathered.push_back(gather_samples(tensor));
  return gathered;
}

torch::Tensor Accelerator::reduce(const torch::Tensor& tensor, ReduceOp op, double scale) {
  const torch::Tensor reduced =
      allreduce(tensor.detach(), {.name = "accelerator.reduce", .op = op});
  return scale == 1.0 ? reduced : reduced * scale;
}

torch::Tensor Accelerator::pad_across_processes(const torch::Tensor& tensor, std::int64_t dim,
                                                double pad_index, bool pad_first) {
  const std::int64_t dims = tensor.dim();
  const bool valid = dim >= -dims && dim < dims;
  const std::int64_t at = dim < 0 ? dim + dims : dim;
  const std::vector<std::int64_t> sizes = gather_object(valid ? tensor.size(at) : std::int64_t{-1});
  if (!valid) {
    throw UsageError(
        text("Accelerator::pad_across_processes: dim: expected a dimension of the "
             "tensor, which has ",
             dims, ", got ", dim));
  }
  const auto missing = std::find(sizes.begin(), sizes.end(), -1);
  if (missing != sizes.end()) {
    throw MismatchError(text("Accelerator::pad_across_processes: the tensor of rank ",
                             missing - sizes.begin(), " has no dimension ", dim,
                             "; expected tensors of as many dimensions on every rank"));
  }
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  const std::int64_t own = tensor.size(at);
  if (own == most) return tensor;
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape[static_cast<std::size_t>(at)] = most - own;
  const torch::Tensor padding = torch::full(shape, pad_index, tensor.options());
  return pad_first ? torch::cat({padding, tensor}, at) : torch::cat({tensor, padding}, at);
}

}  // namespace hvd
