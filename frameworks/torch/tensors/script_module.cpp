#include "tensors/script_module.h"

#include <c10/util/Exception.h>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::libtorch {

bool is_empty_script(const torch::jit::Module& module) {
  try {
    module._ivalue();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

namespace {

void refuse_empty(const torch::jit::Module& module, const std::string& caller) {
  if (!is_empty_script(module)) return;
  throw UsageError(
      text(caller, ": the torch::jit::Module is empty; expected one from torch::jit::load()"));
}

template <class List>
NamedParameters named(const List& list) {
  NamedParameters tensors;
  for (const auto& item : list)
    if (item.value.defined()) tensors.insert(item.name, item.value);
  return tensors;
}

}  // namespace

NamedParameters script_parameters(const torch::jit::Module& module, const std::string& caller) {
  refuse_empty(module, caller);
  return named(module.named_parameters());
}

NamedParameters script_buffers(const torch::jit::Module& module, const std::string& caller) {
  refuse_empty(module, caller);
  return named(module.named_buffers());
}

std::string script_name(const torch::jit::Module& module) {
  return module.type()->name() ? module.type()->name()->qualifiedName() : "torch::jit::Module";
}

std::vector<std::string> script_batch_norms(const torch::jit::Module& module,
                                            const std::string& caller) {
  refuse_empty(module, caller);
  std::vector<std::string> paths;
  for (const auto& item : module.named_modules()) {
    const auto& name = item.value.type()->name();
    const bool is_layer = name && name->name().starts_with("BatchNorm") &&
                          name->prefix().find("nn.modules.batchnorm") != std::string::npos;
    if (is_layer) paths.push_back(item.name);
  }
  return paths;
}

}  // namespace hvd::libtorch
