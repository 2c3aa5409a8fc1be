#pragma once

#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

#include "hvd/torch/parameters.h"

namespace hvd::libtorch {

/// Whether the module is default-constructed.
bool is_empty_script(const torch::jit::Module& module);

/// The parameters of a module that Python has exported, by name. Undefined ones are left out.
/// @param caller begins error texts @throws UsageError for a default-constructed module
NamedParameters script_parameters(const torch::jit::Module& module, const std::string& caller);
/// The same for its buffers. TorchScript does not store which of them are not persistent.
NamedParameters script_buffers(const torch::jit::Module& module, const std::string& caller);

/// The name of the module's class in Python, with its Python module.
std::string script_name(const torch::jit::Module& module);

/// The paths of its BatchNorm layers. @throws as script_parameters()
std::vector<std::string> script_batch_norms(const torch::jit::Module& module,
                                            const std::string& caller);

}  // namespace hvd::libtorch
