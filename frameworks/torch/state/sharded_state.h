#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/object.h"

namespace hvd::libtorch {

/// Appends what one rank saves of a sharded optimizer: type and shapes, options, its part of the
/// state. @param part appends that, as ParameterShards::encode()
void encode_shard(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::function<void()>& part);

/// What all ranks have saved, into an optimizer that then has its whole state. Checks it and
/// changes nothing: that does the function which it returns, which leaves the optimizer as it was
/// when it throws. @throws CheckpointError for another type, other shapes, or parts that are not
/// all
std::function<void()> decode_shards_into(torch::optim::Optimizer& optimizer,
                                         const std::vector<std::string_view>& shards);

}  // namespace hvd::libtorch
