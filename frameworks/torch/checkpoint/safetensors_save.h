#pragma once

#include <c10/core/ScalarType.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/durable_file.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/state_file.h"
#include "hvd/torch/safetensors.h"

namespace hvd::libtorch {

/// LibTorch's dtype of each SafetensorsType.
torch::ScalarType scalar_type(SafetensorsType type);

/// Identifies a tensor's elements. Tensors with equal identities have the same elements in the same
/// memory, like tied weights.
using TensorIdentity = std::tuple<const void*, torch::ScalarType, std::vector<std::int64_t>,
                                  std::vector<std::int64_t>>;
TensorIdentity identity_of(const torch::Tensor& tensor);

/// The tensor's elements as integers of their size, detached. Every operation that moves elements
/// supports these integers, but not every one supports float8 and float4.
torch::Tensor bits_of(const torch::Tensor& tensor);

/// @param caller begins the error text
/// @throws UsageError unless the tensor is defined, dense, and in memory
void check_storable(const std::string& name, const torch::Tensor& tensor, const char* caller);

/// The bytes of a safetensors file. Refers to the tensors. @throws UsageError as save_safetensors()
TensorText safetensors_text(const StateDict& tensors, std::map<std::string, std::string> metadata);

/// Like save_safetensors(). @param calls the system calls, which tests replace
void save_safetensors_to(const std::filesystem::path& file, const StateDict& tensors,
                         const SaveSafetensorsOptions& options, FileCalls& calls);

}  // namespace hvd::libtorch
