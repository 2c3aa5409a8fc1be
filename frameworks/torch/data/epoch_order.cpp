#include "data/epoch_order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <numeric>

namespace hvd::libtorch {

std::vector<std::size_t> epoch_order(std::size_t dataset_size, bool shuffle, std::uint64_t seed,
                                     std::uint64_t epoch) {
  std::vector<std::size_t> order(dataset_size);
  if (!shuffle) {
    std::iota(order.begin(), order.end(), std::size_t{0});
    return order;
  }
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
  const torch::Tensor permutation = torch::randperm(static_cast<std::int64_t>(dataset_size),
                                                    generator, torch::TensorOptions(torch::kInt64));
  const auto* data = permutation.const_data_ptr<std::int64_t>();
  std::transform(data, data + dataset_size, order.begin(),
                 [](std::int64_t i) { return static_cast<std::size_t>(i); });
  return order;
}

}  // namespace hvd::libtorch
