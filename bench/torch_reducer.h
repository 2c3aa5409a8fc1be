#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace hvd::bench {

/// The completed Work that a backend returns when its call has already done the work.
inline c10::intrusive_ptr<c10d::Work> work_done(const std::vector<at::Tensor>& tensors) {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(tensors));
  return c10d::Work::create_from_future(future);
}

/// Makes a group that has only this backend.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_group(
    const c10::intrusive_ptr<c10d::Backend>& backend, c10d::ProcessGroup::BackendType type,
    c10::DeviceType device) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(device, type, backend);
  group->setDefaultBackend(type);
  return group;
}

/// Makes a c10d::Reducer like DistributedDataParallel, with gradients as views into its buckets.
///
/// It is a template because newer versions of LibTorch require more arguments, and the branch for
/// other versions must not be compiled.
/// @param parameters in the order in which the model declares them
template <class Reducer = c10d::Reducer>
std::unique_ptr<Reducer> make_reducer(const std::vector<at::Tensor>& parameters,
                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  using Tensors = std::vector<at::Tensor>;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Buckets = std::vector<std::vector<std::size_t>>;
  using Names = std::unordered_map<std::size_t, std::string>;
  using Caps = std::vector<std::int64_t>;
  const std::vector<bool> sparse(parameters.size(), false);
  // Divides the parameters like DistributedDataParallel before the first step. After that step the
  // reducer divides them again, by the order in which the gradients became ready.
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      parameters, {c10d::kDefaultFirstBucketBytes, c10d::kDefaultBucketBytesCap}, sparse);
  std::reverse(buckets.begin(), buckets.end());
  const auto make = [&, &first_buckets = buckets](auto... newer) {
    return std::make_unique<Reducer>(
        parameters, first_buckets, group, sparse, std::int64_t{c10d::kDefaultBucketBytesCap},
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true, Names{},
        std::int64_t{c10d::kDefaultFirstBucketBytes}, newer...);
  };
  if constexpr (std::is_constructible_v<Reducer, Tensors, Buckets, Group, std::vector<bool>,
                                        std::int64_t, bool, bool, Names, std::int64_t, bool, bool,
                                        Caps>) {
    return make(/*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, Caps{});
  } else {
    return make(false, false);
  }
}

}  // namespace hvd::bench
