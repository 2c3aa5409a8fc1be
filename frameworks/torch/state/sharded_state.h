#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/object.h"

namespace hvd::libtorch {

/// Appends one rank's state of an optimizer: layout, options, and its part of the state. @param
/// part appends the part, like ParameterShards::encode()
void encode_shard(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::function<void()>& part);

/// Whether encode_elements() accepts the optimizer: LibTorch's SGD, Adam, AdamW, Adagrad and
/// RMSprop.
bool encodes_elements(torch::optim::Optimizer& optimizer);
/// Appends the complete state, in the form of encode_shard() for a single rank. Its tensors are
/// expected to be the same on all ranks.
void encode_elements(ObjectWriter& writer, torch::optim::Optimizer& optimizer);

/// Checks the saved states of all ranks and changes nothing. The returned function loads them into
/// the optimizer, which then has its complete state; if it throws, the optimizer is unchanged.
/// @throws CheckpointError for another type, other shapes, or missing parts
std::function<void()> decode_shards_into(torch::optim::Optimizer& optimizer,
                                         const std::vector<std::string_view>& shards);

}  // namespace hvd::libtorch
