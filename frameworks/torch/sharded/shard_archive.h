#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/object.h"
#include "sharded/element_state.h"
#include "sharded/shard_plan.h"

namespace hvd::libtorch {

/// The saved state of some elements of a parameter. It does not depend on buckets or on the number
/// of ranks.
struct SavedPiece {
  std::size_t parameter = 0;          ///< its position in the optimizer, counted through all groups
  std::vector<std::int64_t> strides;  ///< of the parameter: the order of its elements
  ElementRange elements;
  ElementState state;  ///< of one row each; on the CPU when decoded
};

/// @param replicated whether every rank has the same pieces
void encode_pieces(ObjectWriter& writer, const std::vector<SavedPiece>& pieces,
                   bool replicated = false);
/// Appends the state of all parameters of an elementwise optimizer, as encode_pieces() does.
void encode_whole(ObjectWriter& writer, const torch::optim::Optimizer& optimizer, bool replicated);
/// @throws Error for bytes that encode_pieces() has not made
std::vector<SavedPiece> decode_pieces(std::string_view bytes);

using OptimizerStates =
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Appends this rank's part of the state of an optimizer that is not elementwise. The part consists
/// of whole parameters, in the format in which the optimizer itself saves them. @param by_group the
/// rank's parameters, by their positions
/// @param states their states, which do not change
void encode_owned(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::vector<std::vector<std::size_t>>& by_group, OptimizerStates& states);

/// Joins the parts of all ranks. Each part comes from encode_pieces() if the optimizer is
/// elementwise, otherwise from encode_owned(). The returned function gives the state by parameter.
/// The state of an elementwise optimizer is already complete when join_parts() returns; the state
/// of another optimizer is loaded only when the function is called, which may throw.
/// @throws CheckpointError when elements of a parameter are missing or occur twice
std::function<OptimizerStates()> join_parts(torch::optim::Optimizer& optimizer,
                                            const std::vector<std::string_view>& parts);

}  // namespace hvd::libtorch
