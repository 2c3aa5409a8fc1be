#include "state/optimizer_state.h"

#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <optional>
#include <typeinfo>

#include "hvd/error.h"
#include "hvd/torch/distributed_optimizer.h"
#include "optimizer/live_optimizers.h"
#include "sharded/element_state.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

constexpr const char* kDefaultsKey = "hvd_defaults";

using torch::optim::Optimizer;

/// Removes LBFGS's working memory from its state: undefined tensors that cannot be saved. The next
/// step creates it again.
void drop_scratch(torch::optim::Optimizer& optimizer) {
  for (auto& item : optimizer.state()) {
    if (auto* state = dynamic_cast<torch::optim::LBFGSParamState*>(item.second.get()))
      state->al(std::nullopt);
  }
}

/// State is loaded to the device of the parameters, independently of the device it was saved from.
std::optional<torch::Device> device_of(const torch::optim::Optimizer& optimizer) {
  std::optional<torch::Device> device;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      if (device.value_or(parameter.device()) != parameter.device()) {
        throw UsageError("expected the optimizer's parameters on one device, got some on " +
                         device->str() + " and some on " + parameter.device().str() +
                         "; use an optimizer for each");
      }
      device = parameter.device();
    }
  }
  return device;
}

}  // namespace

Optimizer& unwrapped(Optimizer& optimizer) {
  auto* const wrapper = dynamic_cast<OptimizerWrapper*>(&optimizer);
  return wrapper == nullptr ? optimizer : wrapper->inner();
}

void refuse_sharded(const Optimizer& optimizer, const std::string& what) {
  if (!LiveOptimizers::instance().is_sharded(optimizer)) return;
  throw UsageError(what +
                   ": the state of this optimizer is shared out among the ranks by a "
                   "ShardedOptimizer, so that the optimizer itself has none; expected the "
                   "ShardedOptimizer in its place");
}

std::string save_optimizer(Optimizer& optimizer) {
  ObjectWriter writer;
  writer.reserve(saved_bytes(optimizer));
  save_optimizer(optimizer, writer);
  return writer.take();
}

void save_optimizer(Optimizer& any, ObjectWriter& writer) {
  Optimizer& optimizer = unwrapped(any);
  drop_scratch(optimizer);
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  torch::serialize::OutputArchive defaults(archive.compilation_unit());
  optimizer.defaults().serialize(defaults);
  archive.write(kDefaultsKey, defaults);
  append(writer, archive);
}

std::size_t saved_bytes(Optimizer& any) {
  Optimizer& optimizer = unwrapped(any);
  if (!is_elementwise(optimizer)) return 0;
  constexpr std::size_t kBesides =
      1024;  // per tensor and parameter, for names, shapes and alignment
  std::size_t bytes = 64 * kBesides;
  for (const auto& item : optimizer.state()) {
    bytes += kBesides;
    for (const torch::Tensor& tensor : element_state_of(*item.second).tensors)
      bytes += kBesides + (tensor.defined() ? tensor.nbytes() : 0);
  }
  return bytes;
}

void load_optimizer(Optimizer& any, std::string_view bytes) {
  Optimizer& optimizer = unwrapped(any);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), device_of(optimizer));
  // Loading only adds state, so the current state is removed first.
  optimizer.state().clear();
  optimizer.load(archive);
  torch::serialize::InputArchive defaults;
  archive.read(kDefaultsKey, defaults);
  optimizer.defaults().serialize(defaults);
  unwrapped(any);  // updates the wrapper's options
}

OptimizerLayout layout_of(Optimizer& any) {
  const Optimizer& optimizer = unwrapped(any);
  OptimizerLayout layout;
  layout.first = c10::demangle(typeid(optimizer).name());
  for (const auto& group : optimizer.param_groups()) {
    auto& shapes = layout.second.emplace_back();
    for (const torch::Tensor& parameter : group.params()) shapes.push_back(parameter.sizes().vec());
  }
  return layout;
}

std::string difference(const OptimizerLayout& expected, const OptimizerLayout& got,
                       const std::string& whose) {
  const std::string wanted = "expected " + whose + " ";
  if (expected.first != got.first) return wanted + expected.first + ", got " + got.first;
  if (expected.second.size() != got.second.size()) {
    return wanted + std::to_string(expected.second.size()) + " parameter groups, got " +
           std::to_string(got.second.size());
  }
  for (std::size_t g = 0; g < got.second.size(); ++g) {
    const auto& theirs = expected.second[g];
    const auto& own = got.second[g];
    const std::string group = "parameter group " + std::to_string(g);
    if (theirs.size() != own.size()) {
      return group + ": " + wanted + std::to_string(theirs.size()) + " parameters, got " +
             std::to_string(own.size());
    }
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (theirs[i] != own[i]) {
        return group + ", parameter " + std::to_string(i) + ": " + wanted + "shape " +
               shape_to_string(theirs[i]) + ", got " + shape_to_string(own[i]);
      }
    }
  }
  return {};
}

}  // namespace hvd::libtorch
