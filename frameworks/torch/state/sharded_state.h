#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::libtorch {

/// What one rank saves of a sharded optimizer: type and shapes, options, its part of the state.
/// @param part from ParameterShards::encode()
std::string encode_shard(torch::optim::Optimizer& optimizer, const std::string& part);

/// What all ranks have saved, into an optimizer that then has its whole state. Checks it and
/// changes nothing: that does the function which it returns, which leaves the optimizer as it was
/// when it throws. @throws CheckpointError for another type, other shapes, or parts that are not
/// all
std::function<void()> decode_shards_into(torch::optim::Optimizer& optimizer,
                                         const std::vector<std::string_view>& shards);

}  // namespace hvd::libtorch
