#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

/// LibTorch's optimizers that update element by element, with the options that need most state.
inline std::map<std::string, MakeOptimizer> elementwise_optimizers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  return {
      {"SGD",
       [](auto p) {
         return std::make_unique<SGD>(std::move(p),
                                      SGDOptions(0.05).momentum(0.9).weight_decay(1e-2));
       }},
      {"Adam",
       [](auto p) {
         return std::make_unique<Adam>(std::move(p), AdamOptions(0.01).amsgrad(true));
       }},
      {"AdamW",
       [](auto p) {
         return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1));
       }},
      {"Adagrad",
       [](auto p) {
         return std::make_unique<Adagrad>(
             std::move(p), AdagradOptions(0.05).lr_decay(0.01).initial_accumulator_value(0.1));
       }},
      {"RMSprop",
       [](auto p) {
         return std::make_unique<RMSprop>(std::move(p),
                                          RMSpropOptions(0.005).momentum(0.5).centered(true));
       }},
  };
}

/// A model that is equal on all ranks, and a copy for the serial run.
struct Pair {
  Net sharded;
  Net serial;
  Pair() {
    torch::manual_seed(10 + rank());
    sharded = Net();
    serial = Net();
    broadcast_parameters(sharded);
    copy_values(*sharded, *serial);
  }
};

inline void expect_equal_models(Net& actual, Net& expected, double tolerance = 1e-4) {
  const auto a = actual->named_parameters();
  const auto b = expected->named_parameters();
  for (const auto& item : a) {
    EXPECT_TRUE(near(item.value(), b[item.key()], tolerance)) << item.key();
  }
  EXPECT_TRUE(same_on_all_ranks(actual->parameters()));
}

/// Makes one step on this rank's batch, and a serial one on the joined batch.
template <class Optimizer>
void step_both(Pair& nets, Optimizer& optimizer, torch::optim::Optimizer& serial, int step) {
  optimizer.zero_grad();
  loss_of(nets.sharded, Batch::of_rank(rank(), step)).backward();
  optimizer.step();
  serial.zero_grad();
  loss_of(nets.serial, Batch::joined(step)).backward();
  serial.step();
}

/// Calls `train` for each of these optimizers with a new pair of models, an optimizer that a
/// ShardedOptimizer is to wrap, and the optimizer of the serial run. `train` must compare the
/// models while its ShardedOptimizer exists.
using Train =
    std::function<void(Pair&, torch::optim::Optimizer& inner, torch::optim::Optimizer& serial)>;
inline void train_by_each_optimizer(const Train& train) {
  for (const auto& [name, make] : elementwise_optimizers()) {
    SCOPED_TRACE(name);
    Pair nets;
    const auto inner = make(nets.sharded->parameters());
    const auto serial = make(nets.serial->parameters());
    train(nets, *inner, *serial);
  }
}

}  // namespace hvd::testing
