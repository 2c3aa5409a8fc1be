#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {

/// A folder that all ranks share, removed at the end of the test. Collective.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name = ::testing::TempDir() + "hvd-checkpoint-XXXXXX";
    if (rank() == 0 && ::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no temporary folder";
    path_ = broadcast_object(name);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  ~SharedFolder() {
    barrier();
    std::error_code ignored;
    if (rank() == 0) std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path file(std::uint64_t step, const std::string& name) const {
    std::string number = std::to_string(step);
    number.insert(0, 12 - number.size(), '0');
    return path_ / ("step-" + number) / name;
  }

 private:
  std::filesystem::path path_;
};

/// The objects of a training program, with values that differ by rank.
struct Program {
  torch::nn::Sequential net{torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::Dropout(0.5), torch::nn::Linear(8, 2)};
  torch::optim::Adam adam{std::vector<torch::optim::OptimizerParamGroup>{
      torch::optim::OptimizerParamGroup(net[0]->parameters()),
      torch::optim::OptimizerParamGroup(
          std::vector<torch::Tensor>{net[1]->parameters()[0], net[1]->parameters()[1],
                                     net[3]->parameters()[0], net[3]->parameters()[1]},
          std::make_unique<torch::optim::AdamOptions>(1e-2))}};
  DistributedOptimizer optimizer;
  GradScaler scaler{{.init_scale = 8, .growth_interval = 2}};
  DistributedSampler sampler;
  int epoch = 0;
  std::vector<double> losses;

  explicit Program(const ProcessSet& set = {})
      : optimizer(adam, net->named_parameters(), {.process_set = set}),
        sampler(96, {.seed = 3, .process_set = set}) {}

  TrainingState state() {
    TrainingState all;
    all.model(net).optimizer(optimizer).scaler(scaler).sampler(sampler).random();
    return all.value("epoch", epoch).value("losses", losses);
  }

  /// One step with this rank's share of the data and this rank's random numbers.
  void train() {
    const auto indices = sampler.next(4);
    if (!indices) return;
    std::vector<std::int64_t> rows(indices->begin(), indices->end());
    const torch::Tensor x = torch::sin(torch::tensor(rows, torch::kFloat32).unsqueeze(1) +
                                       torch::arange(6).unsqueeze(0));
    optimizer.zero_grad();
    const torch::Tensor loss = net->forward(x).square().mean();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    losses.push_back(loss.item<double>());
  }

  /// The state that a checkpoint should have, as text; tensors as hashes of their bits.
  std::vector<std::string> everything() {
    std::vector<std::string> lines = but_for_sampler();
    lines.push_back("sampler " + std::to_string(sampler.epoch()) + ' ' +
                    std::to_string(sampler.index()));
    return lines;
  }
  std::vector<std::string> but_for_sampler() {
    std::vector<std::string> lines{"epoch " + std::to_string(epoch),
                                   "scale " + std::to_string(scaler.get_scale())};
    for (const double loss : losses) lines.push_back("loss " + std::to_string(loss));
    const auto add = [&](const std::string& what, const torch::Tensor& tensor) {
      const torch::Tensor plain = tensor.detach().contiguous();
      const std::string_view bytes(static_cast<const char*>(plain.const_data_ptr()),
                                   plain.nbytes());
      lines.push_back(what + ' ' + std::to_string(std::hash<std::string_view>()(bytes)));
    };
    for (const auto& item : net->named_parameters()) add(item.key(), item.value());
    for (const auto& item : net->named_buffers()) add(item.key(), item.value());
    for (const auto& group : adam.param_groups()) {
      lines.push_back("lr " + std::to_string(group.options().get_lr()));
      for (const auto& parameter : group.params()) {
        const auto found = adam.state().find(parameter.unsafeGetTensorImpl());
        if (found == adam.state().end()) continue;
        const auto& own = static_cast<torch::optim::AdamParamState&>(*found->second);
        lines.push_back("step " + std::to_string(own.step()));
        add("exp_avg", own.exp_avg());
        add("exp_avg_sq", own.exp_avg_sq());
      }
    }
    add("random", at::detail::getDefaultCPUGenerator().get_state());
    return lines;
  }
};

}  // namespace hvd::testing
