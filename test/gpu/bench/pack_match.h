#pragma once

#include <torch/types.h>

namespace hvd::bench {

/// Times hvd's pack and scale against `_foreach_copy_` and `_foreach_div_` on the gradients of
/// ResNet-50, in turns, and prints a line of JSON for each.
/// @return whether both gave the same numbers
bool run_pack_match(torch::Device device, double seconds);

}  // namespace hvd::bench
