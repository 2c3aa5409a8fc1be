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

/// The state of some elements of a parameter, as it is saved. Independent of buckets and of the
/// number of ranks.
struct SavedPiece {
  std::size_t parameter = 0;          ///< number in the optimizer, through all groups
  std::vector<std::int64_t> strides;  ///< strides of the parameter, which give the elements' order
  ElementRange elements;
  ElementState state;  ///< one row for each tensor, on the CPU
};

void encode_pieces(ObjectWriter& writer, const std::vector<SavedPiece>& pieces);
/// @throws Error for bytes that do not come from encode_pieces()
std::vector<SavedPiece> decode_pieces(std::string_view bytes);

using OptimizerStates =
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Writes a rank's part of the state of an optimizer that is not elementwise: the state of whole
/// parameters, as the optimizer itself saves it. @param by_group numbers of the rank's parameters
/// @param states their states, which do not change
void encode_owned(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::vector<std::vector<std::size_t>>& by_group, OptimizerStates& states);

/// Joins the parts of all ranks, each from encode_pieces() or encode_owned(), according to the
/// optimizer's kind. @return a function that returns the state by parameter. The state of an
/// elementwise optimizer is joined at once; others are loaded by the returned function, which may
/// throw. @throws CheckpointError if elements of a parameter are missing or occur twice
std::function<OptimizerStates()> join_parts(torch::optim::Optimizer& optimizer,
                                            const std::vector<std::string_view>& parts);

}  // namespace hvd::libtorch
