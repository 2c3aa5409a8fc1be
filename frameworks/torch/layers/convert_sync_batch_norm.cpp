#include <c10/util/Type.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/torch/sync_batch_norm.h"
#include "tensors/script_module.h"

namespace hvd {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// A layer to replace, with all its parents.
struct FoundLayer {
  struct Parent {
    Module* module = nullptr;
    std::string key;  ///< the layer's name in the parent
  };
  Module* layer = nullptr;
  std::string path;  ///< the path through its first parent
  std::vector<Parent> parents;
};

/// Calls `act(layer)` if the module is exactly one of LibTorch's BatchNorm layers. @return false,
/// without a call, for other modules and for types that derive from LibTorch's
template <class Act>
bool with_batch_norm(Module& module, const Act& act) {
  const auto try_one = [&]<class Layer>(const Layer*) {
    if (typeid(module) != typeid(Layer)) return false;
    act(static_cast<Layer&>(module));
    return true;
  };
  return try_one(static_cast<const torch::nn::BatchNorm1dImpl*>(nullptr)) ||
         try_one(static_cast<const torch::nn::BatchNorm2dImpl*>(nullptr)) ||
         try_one(static_cast<const torch::nn::BatchNorm3dImpl*>(nullptr));
}

bool is_batch_norm(Module& module) {
  return with_batch_norm(module, [](const auto&) {});
}

/// Containers hold a second pointer to each child, through which they call it.
bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

template <class Layer>
void replace_in_container(Module& parent, const Module* old, const std::shared_ptr<Layer>& layer) {
  if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&parent)) {
    for (auto& slot : *sequential) {
      if (slot.ptr().get() == old) slot = torch::nn::AnyModule(layer);
    }
  } else if (auto* const list = dynamic_cast<torch::nn::ModuleListImpl*>(&parent)) {
    for (ModulePtr& slot : *list) {
      if (slot.get() == old) slot = layer;
    }
  } else if (auto* const dict = dynamic_cast<torch::nn::ModuleDictImpl*>(&parent)) {
    for (auto& slot : *dict) {
      if (slot.value().get() == old) slot.value() = layer;
    }
  }
}

/// Adds the layers below a module, in the order of their registration.
/// @param seen modules whose children have been added already; a subtree may have several parents
void find_layers(Module& parent, const std::string& prefix, std::set<const Module*>& seen,
                 std::vector<FoundLayer>& found) {
  if (!seen.insert(&parent).second) return;
  for (const auto& child : parent.named_children()) {
    const std::string path = prefix.empty() ? child.key() : prefix + "." + child.key();
    Module& module = *child.value();
    if (!is_batch_norm(module)) {
      find_layers(module, path, seen, found);
      continue;
    }
    auto layer = std::find_if(found.begin(), found.end(),
                              [&](const FoundLayer& one) { return one.layer == &module; });
    if (layer == found.end()) layer = found.insert(found.end(), {&module, path, {}});
    layer->parents.push_back({&parent, child.key()});
  }
}

/// Whether the layer has other owners, such as a parent's typed member, which would still call the
/// old layer.
bool held_elsewhere(const FoundLayer& found) {
  long expected = 0;
  for (const auto& parent : found.parents) expected += is_container(*parent.module) ? 2 : 1;
  return found.layer->weak_from_this().use_count() > expected;
}

void refuse_held(const std::vector<FoundLayer>& all) {
  std::string paths;
  for (const FoundLayer& found : all) {
    if (held_elsewhere(found)) paths += (paths.empty() ? "'" : ", '") + found.path + "'";
  }
  if (paths.empty()) return;
  throw UsageError(
      "convert_sync_batchnorm: cannot replace " + paths +
      ": the layer has another owner besides the list of children, such as a typed member of its "
      "parent (torch::nn::BatchNorm2d bn) or a variable, which would still call the old layer; C++ "
      "cannot change the owner's type. Declare that member as hvd::SyncBatchNorm1d, 2d or 3d (the "
      "keys of the state stay the same). No layer has been replaced");
}

template <std::size_t D, class Old>
void replace(const torch::nn::NormImplBase<D, Old, torch::nn::BatchNormOptions>& old,
             const FoundLayer& found, const ProcessSet& process_set) {
  using Layers = std::tuple<SyncBatchNorm1dImpl, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl>;
  const auto layer = std::make_shared<std::tuple_element_t<D - 1, Layers>>(old, process_set);
  const Module* const replaced = &old;  // destroyed with its last reference
  for (const auto& parent : found.parents) {
    replace_in_container(*parent.module, replaced, layer);
    parent.module->replace_module(parent.key, layer);
  }
}

}  // namespace

std::size_t convert_sync_batchnorm(Module& module, const ProcessSet& process_set) {
  if (is_batch_norm(module)) {
    throw UsageError("convert_sync_batchnorm: the module is itself a " +
                     c10::demangle(typeid(module).name()) +
                     ", whose type cannot change in place; construct "
                     "hvd::SyncBatchNorm1d, 2d or 3d from it: hvd::SyncBatchNorm2d(*layer)");
  }
  libtorch::check_layer_set(process_set, "convert_sync_batchnorm");
  std::set<const Module*> seen;
  std::vector<FoundLayer> all;
  find_layers(module, "", seen, all);
  refuse_held(all);
  for (const FoundLayer& found : all)
    with_batch_norm(*found.layer, [&](const auto& old) { replace(old, found, process_set); });
  return all.size();
}

std::size_t convert_sync_batchnorm(const torch::jit::Module& module,
                                   const ProcessSet& process_set) {
  constexpr const char* kCaller = "convert_sync_batchnorm";
  libtorch::check_layer_set(process_set, kCaller);
  const std::vector<std::string> paths = libtorch::script_batch_norms(module, kCaller);
  if (paths.empty()) return 0;
  throw UsageError(text(
      kCaller, ": cannot replace '", join_text(paths, "', '"), "' in the exported module ",
      libtorch::script_name(module),
      ": TorchScript has compiled the layers' code, which does not exchange statistics. Train with "
      "each rank's own statistics and call broadcast_buffers() before an evaluation; or rebuild "
      "the module in C++ with hvd::SyncBatchNorm1d, 2d or 3d and load its weights with "
      "load_safetensors(). Nothing has been replaced"));
}

}  // namespace hvd
