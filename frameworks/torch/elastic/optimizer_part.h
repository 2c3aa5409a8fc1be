#pragma once

#include <torch/optim/optimizer.h>

#include <string>

#include "hvd/elastic.h"

namespace hvd::libtorch {

/// The options of all groups of an elementwise optimizer, and the reference of the weights of its
/// gradients.
/// @param optimizer not a wrapper
elastic::Part options_part(std::string name, torch::optim::Optimizer& optimizer);
/// The state of all parameters of an elementwise optimizer. Its bytes are equal on ranks whose
/// states are equal. @param optimizer not a wrapper
/// @param copied whether commits copy it; if not, the bytes are freed when they have been used
elastic::Part state_part(std::string name, torch::optim::Optimizer& optimizer, bool copied);

}  // namespace hvd::libtorch
