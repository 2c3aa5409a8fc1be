#pragma once

#include <torch/types.h>

namespace hvd::bench {

/// Compares the time of hvd's pack and scale with that of `_foreach_copy_` and `_foreach_div_` on
/// the gradients of ResNet-50, alternately, and prints a line of JSON for each.
/// @return whether both gave the same numbers
bool run_pack_match(torch::Device device, double seconds);

}  // namespace hvd::bench
