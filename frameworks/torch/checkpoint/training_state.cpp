#include "hvd/torch/training_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <string>

#include "checkpoint/checkpoint_vote.h"
#include "checkpoint/state_item.h"
#include "hvd/error.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/join.h"
#include "hvd/torch/parameters.h"
#include "operations/agreement.h"
#include "operations/membership.h"

namespace hvd {

TrainingState& TrainingState::add(const std::string& name,
                                  std::shared_ptr<libtorch::StateItem> item) {
  if (name.empty()) throw UsageError("TrainingState: expected a name, got an empty one");
  const bool taken = std::any_of(entries_.begin(), entries_.end(),
                                 [&](const Entry& entry) { return entry.name == name; });
  if (taken) {
    throw UsageError("TrainingState: the name '" + name +
                     "' is taken; give each item its own name, as in model(net, \"net2\")");
  }
  entries_.push_back({name, std::move(item)});
  return *this;
}

TrainingState& TrainingState::model(torch::nn::Module& module, const std::string& name) {
  return model(module, ModelStateOptions{.name = name});
}

TrainingState& TrainingState::model(torch::nn::Module& module, ModelStateOptions options) {
  const std::string name = options.name;
  return add(name, std::make_shared<libtorch::ModuleItem>(module, std::move(options)));
}

TrainingState& TrainingState::model(const torch::jit::Module& module, const std::string& name) {
  return model(module, ModelStateOptions{.name = name});
}

TrainingState& TrainingState::model(const torch::jit::Module& module, ModelStateOptions options) {
  const std::string name = options.name;
  return add(name, std::make_shared<libtorch::ModuleItem>(module, std::move(options)));
}

torch::nn::Module& TrainingState::checked(torch::nn::Module* module) {
  if (module == nullptr) throw UsageError("TrainingState: model: expected a module, got null");
  return *module;
}

TrainingState& TrainingState::optimizer(torch::optim::Optimizer& optimizer,
                                        const std::string& name) {
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer))
    return this->optimizer(*sharded, name);
  return add(name, std::make_shared<libtorch::OptimizerItem>(optimizer));
}

TrainingState& TrainingState::optimizer(DistributedOptimizer& optimizer, const std::string& name) {
  return this->optimizer(static_cast<torch::optim::Optimizer&>(optimizer), name);
}

TrainingState& TrainingState::optimizer(ShardedOptimizer& optimizer, const std::string& name) {
  return add(name, std::make_shared<libtorch::ShardedOptimizerItem>(optimizer));
}

TrainingState& TrainingState::scheduler(torch::optim::LRScheduler& scheduler,
                                        const std::string& name) {
  return add(name, std::make_shared<libtorch::SchedulerItem>(scheduler));
}

TrainingState& TrainingState::scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                                        const std::string& name) {
  return add(name, std::make_shared<libtorch::PlateauItem>(scheduler));
}

TrainingState& TrainingState::metric(Metric& metric, const std::string& name) {
  return add(name, std::make_shared<libtorch::MetricItem>(metric));
}

TrainingState& TrainingState::custom(const std::string& name,
                                     std::function<void(torch::serialize::OutputArchive&)> save,
                                     std::function<void(torch::serialize::InputArchive&)> load) {
  if (!save || !load) {
    throw UsageError("TrainingState: custom '" + name +
                     "': expected a function that saves and one that loads, got an empty one");
  }
  return add(name, std::make_shared<libtorch::CustomItem>(std::move(save), std::move(load)));
}

TrainingState& TrainingState::scaler(GradScaler& scaler, const std::string& name) {
  return add(name, std::make_shared<libtorch::ScalerItem>(scaler));
}

TrainingState& TrainingState::sampler(DistributedSampler& sampler, const std::string& name) {
  return add(name, std::make_shared<libtorch::SamplerItem>(sampler));
}

TrainingState& TrainingState::progress(std::shared_ptr<libtorch::LoaderProgress> progress,
                                       const std::string& name) {
  return add(name, std::make_shared<libtorch::LoaderItem>(std::move(progress)));
}

TrainingState& TrainingState::random(const std::string& name) {
  random(at::detail::getDefaultCPUGenerator(), name);
  if (libtorch::waits_for_rank()) return *this;  // it has no GPU yet
  if (const torch::Device gpu = device(); gpu.is_cuda())
    random(at::globalContext().defaultGenerator(gpu), name + ".cuda");
  return *this;
}

TrainingState& TrainingState::random(at::Generator generator, const std::string& name) {
  if (!generator.defined()) {
    throw UsageError(
        "TrainingState: random: the generator is undefined; expected one, such as that of "
        "at::make_generator<at::CPUGeneratorImpl>()");
  }
  return add(name, std::make_shared<libtorch::GeneratorItem>(std::move(generator)));
}

TrainingState& TrainingState::random(const RandomStreams& streams, const std::string& name) {
  return add(name, std::make_shared<libtorch::StreamTableItem>(streams.table_));
}

int join(const TrainingState& state) {
  const int last = join();
  libtorch::agree({.name = "join.state",
                   .title = "join(state)",
                   .expected = "expected the same items on every rank"},
                  "", {{"", libtorch::description_of(state)}});
  for (const TrainingState::Entry& entry : state.entries()) {
    entry.item->broadcast_shared(last, "join." + entry.name);
  }
  return last;
}

}  // namespace hvd
