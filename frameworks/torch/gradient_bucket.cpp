#include "gradient_bucket.h"

#include <torch/types.h>

#include <map>
#include <utility>

#include "hvd/memory.h"
#include "tensor_adapter.h"

namespace hvd::libtorch {
namespace {

constexpr std::size_t kLine = 64;

/// What a gradient takes up in a bucket: whole cache lines, so that each begins as aligned as a tensor of its own.
std::size_t room_for(const torch::Tensor& parameter) { return (parameter.nbytes() + kLine - 1) / kLine * kLine; }

std::vector<std::int64_t> strides_for(const torch::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 1);
  for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * parameter.size(static_cast<std::int64_t>(d));
  return strides;
}

}  // namespace

GradientBucket::GradientBucket(std::string name, const GradientReduction& how, std::span<const torch::Tensor> parameters) {
  std::size_t bytes = 0;
  for (const torch::Tensor& parameter : parameters) bytes += room_for(parameter);
  const std::shared_ptr<std::byte> memory = allocate_shared(bytes);
  std::size_t offset = 0;
  for (const torch::Tensor& parameter : parameters) {
    std::byte* const begin = memory.get() + offset;
    views_.push_back(torch::from_blob(begin, parameter.sizes(), strides_for(parameter), [memory](void*) {},
                                      parameter.options().requires_grad(false)));
    offset += room_for(parameter);
  }
  const torch::Tensor all = torch::from_blob(memory.get(), {static_cast<std::int64_t>(bytes / parameters.front().element_size())},
                                             parameters.front().options().requires_grad(false));
  all.zero_();  // what lies between the gradients is reduced with them
  submission_ = reduction_in_place(std::move(name), how, view_of(all));
  submission_.keep_alive = memory;
  submission_.alone = bytes >= kWorthACallOfItsOwn;
}

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order, std::span<const torch::Tensor> parameters,
                                                   std::size_t most_bytes) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
  };
  std::map<torch::ScalarType, Open> open;
  std::vector<std::vector<std::size_t>> buckets;
  for (const std::size_t index : order) {
    Open& bucket = open[parameters[index].scalar_type()];
    const std::size_t bytes = room_for(parameters[index]);
    if (!bucket.members.empty() && bucket.bytes + bytes > most_bytes) buckets.push_back(std::exchange(bucket, {}).members);
    bucket.members.push_back(index);
    bucket.bytes += bytes;
  }
  for (auto& [type, bucket] : open) {
    if (!bucket.members.empty()) buckets.push_back(std::move(bucket.members));
  }
  return buckets;
}

}  // namespace hvd::libtorch
