#include <c10/util/Type.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/torch/sync_batch_norm.h"

namespace hvd {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// A parent of a layer, and the layer's name in it.
struct Place {
  Module* parent = nullptr;
  std::string key;
  std::string path;
};
/// A layer to replace, with all its parents.
struct Found {
  Module* layer = nullptr;
  std::vector<Place> places;
};

/// Calls `act(layer)` with a layer of LibTorch's exact type. @return false, without a call, for
/// other modules and for types that derive from LibTorch's
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

/// The pointer through which a container calls the child; null if `parent` is not a container.
class Slots {
 public:
  explicit Slots(Module& parent)
      : sequential_(dynamic_cast<torch::nn::SequentialImpl*>(&parent)),
        list_(dynamic_cast<torch::nn::ModuleListImpl*>(&parent)),
        dict_(dynamic_cast<torch::nn::ModuleDictImpl*>(&parent)) {}

  bool any() const { return sequential_ != nullptr || list_ != nullptr || dict_ != nullptr; }

  template <class Layer>
  void replace(const Module* old, const std::shared_ptr<Layer>& layer) {
    if (sequential_ != nullptr) {
      for (auto& slot : *sequential_) {
        if (slot.ptr().get() == old) slot = torch::nn::AnyModule(layer);
      }
    }
    if (list_ != nullptr) {
      for (ModulePtr& slot : *list_) {
        if (slot.get() == old) slot = layer;
      }
    }
    if (dict_ != nullptr) {
      for (auto& slot : *dict_) {
        if (slot.value().get() == old) slot.value() = layer;
      }
    }
  }

 private:
  torch::nn::SequentialImpl* const sequential_;
  torch::nn::ModuleListImpl* const list_;
  torch::nn::ModuleDictImpl* const dict_;
};

/// The layers below a module, in the order of their registration.
class Search {
 public:
  void look_into(Module& parent, const std::string& prefix) {
    if (!seen_.insert(&parent).second) return;  // a subtree may have several parents
    for (const auto& child : parent.named_children()) {
      const std::string path = prefix.empty() ? child.key() : prefix + "." + child.key();
      if (is_batch_norm(*child.value())) {
        add(*child.value(), {&parent, child.key(), path});
      } else {
        look_into(*child.value(), path);
      }
    }
  }
  const std::vector<Found>& found() const { return found_; }

 private:
  void add(Module& layer, Place place) {
    for (Found& known : found_) {
      if (known.layer == &layer) return known.places.push_back(std::move(place));
    }
    found_.push_back({&layer, {std::move(place)}});
  }

  std::set<const Module*> seen_;
  std::vector<Found> found_;
};

/// Finds layers with other owners, such as a parent's typed member, which would still call the old
/// layer.
bool held_elsewhere(const Found& found) {
  long expected = 0;
  for (const Place& place : found.places) expected += Slots(*place.parent).any() ? 2 : 1;
  return found.layer->weak_from_this().use_count() > expected;
}

void refuse_held(const std::vector<Found>& all) {
  std::string paths;
  for (const Found& found : all) {
    if (!held_elsewhere(found)) continue;
    paths += (paths.empty() ? "'" : ", '") + found.places.front().path + "'";
  }
  if (paths.empty()) return;
  throw UsageError(
      "convert_sync_batchnorm: cannot replace " + paths +
      ": something besides the list of children holds the layer, as a typed member of its parent "
      "(torch::nn::BatchNorm2d bn) or a variable does, and would go on calling the old one; C++ "
      "cannot change it. Declare that member as hvd::SyncBatchNorm1d, 2d or 3d (the keys of the "
      "state stay the same). Nothing has been replaced");
}

template <std::size_t D>
struct Synchronised;
template <>
struct Synchronised<1> {
  using Layer = SyncBatchNorm1dImpl;
};
template <>
struct Synchronised<2> {
  using Layer = SyncBatchNorm2dImpl;
};
template <>
struct Synchronised<3> {
  using Layer = SyncBatchNorm3dImpl;
};

template <std::size_t D, class Old>
void replace(const torch::nn::NormImplBase<D, Old, torch::nn::BatchNormOptions>& old,
             const std::vector<Place>& places, const ProcessSet& process_set) {
  const auto layer = std::make_shared<typename Synchronised<D>::Layer>(old, process_set);
  const Module* const replaced = &old;  // destroyed with its last reference
  for (const Place& place : places) {
    Slots(*place.parent).replace(replaced, layer);
    place.parent->replace_module(place.key, layer);
  }
}

}  // namespace

std::size_t convert_sync_batchnorm(Module& module, const ProcessSet& process_set) {
  if (is_batch_norm(module)) {
    throw UsageError("convert_sync_batchnorm: the module is itself a " +
                     c10::demangle(typeid(module).name()) +
                     ", which cannot become another type where it is; construct "
                     "hvd::SyncBatchNorm1d, 2d or 3d from it: hvd::SyncBatchNorm2d(*layer)");
  }
  libtorch::check_layer_set(process_set, "convert_sync_batchnorm");
  Search search;
  search.look_into(module, "");
  refuse_held(search.found());
  for (const Found& found : search.found()) {
    with_batch_norm(*found.layer,
                    [&](const auto& old) { replace(old, found.places, process_set); });
  }
  return search.found().size();
}

}  // namespace hvd
