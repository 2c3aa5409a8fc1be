#pragma once

#include <torch/types.h>

#include <span>
#include <string>

#include "optimizer/reduced_parameter.h"

namespace hvd::libtorch {

/// Warns when backward passes go on after the wrapper of a parameter's optimizer was destroyed,
/// which reduces the gradients no more: the wrapped optimizer would train another model on each
/// rank. Keeps no parameter alive. Thread-safe.

/// @param parameters that the wrapper has reduced  @param wrapper how messages name it
void watch_departed(std::span<const ReducedParameter> parameters, const std::string& wrapper);
/// Another wrapper reduces these parameters.
void forget_departed(std::span<const ReducedParameter> parameters);

}  // namespace hvd::libtorch
