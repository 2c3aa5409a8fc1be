#include "bench/model.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "bench/exercise.h"

namespace hvd::bench {
namespace {

/// The source of the gradient of one parameter.
struct GradientSource {
  const std::vector<float>* pattern = nullptr;
  std::size_t first = 0;
  std::vector<std::int64_t> sizes;

  at::Tensor make() const {
    at::Tensor gradient = at::empty(sizes);
    write_pattern(*pattern, first,
                  {gradient.mutable_data_ptr<float>(), static_cast<std::size_t>(gradient.numel())});
    return gradient;
  }
};

/// A layer without computation: forward returns a copy of its input, and backward writes the
/// gradient of its parameter into new memory, as the kernel of a real layer does.
class SilentLayer : public torch::autograd::Function<SilentLayer> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& activation,
                            const at::Tensor& /*parameter*/, const GradientSource* source) {
    context->saved_data["source"] = reinterpret_cast<std::int64_t>(source);
    return activation.clone();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* const source =
        reinterpret_cast<const GradientSource*>(context->saved_data["source"].toInt());
    return {gradients.at(0), source->make(), at::Tensor()};
  }
};

/// A sequence of silent layers, so that gradients are computed one by one, the last parameter's
/// first.
class SilentNetwork final : public Model {
 public:
  SilentNetwork(const std::vector<at::Tensor>& values, int rank)
      : Model(values), pattern_(pattern_of(rank)) {
    constexpr std::size_t kShiftPerLayer = 101;  // so that gradients of equal shape differ
    for (const at::Tensor& parameter : parameters()) {
      sources_.push_back({&pattern_, sources_.size() * kShiftPerLayer, parameter.sizes().vec()});
    }
  }

  at::Tensor loss() override {
    at::Tensor activation = at::zeros({});
    for (std::size_t i = 0; i < sources_.size(); ++i)
      activation = SilentLayer::apply(activation, parameters()[i], &sources_[i]);
    return activation;
  }

 private:
  const std::vector<float> pattern_;
  std::vector<GradientSource> sources_;
};

/// The network of examples/mnist.cpp, on images and labels that are drawn once.
class ConvolutionalNetwork final : public Model {
 public:
  ConvolutionalNetwork(const std::vector<at::Tensor>& values, int rank, int batch_size)
      : Model(values) {
    at::manual_seed(static_cast<std::uint64_t>(rank) + 1);
    images_ = at::randn({batch_size, 1, 28, 28});
    labels_ = at::randint(0, 10, {batch_size}, at::kLong);
  }

  at::Tensor loss() override { return mnist_loss(parameters(), images_, labels_); }

 private:
  at::Tensor images_;
  at::Tensor labels_;
};

}  // namespace

Model::Model(const std::vector<at::Tensor>& values) {
  for (const at::Tensor& value : values) parameters_.push_back(value.detach().requires_grad_());
}

at::Tensor mnist_loss(const std::vector<at::Tensor>& p, const at::Tensor& images,
                      const at::Tensor& labels) {
  at::Tensor x = at::relu(at::conv2d(images, p[0], p[1]));
  x = at::relu(at::conv2d(x, p[2], p[3]));
  x = at::dropout(at::max_pool2d(x, 2), 0.25, /*train=*/true);
  x = at::relu(at::linear(x.flatten(1), p[4], p[5]));
  x = at::linear(at::dropout(x, 0.5, /*train=*/true), p[6], p[7]);
  return at::nll_loss(at::log_softmax(x, 1), labels);
}

std::vector<at::Tensor> initial_values(const ParameterSet& set) {
  at::manual_seed(1);
  std::vector<at::Tensor> values;
  for (const Shape& shape : set.shapes) {
    at::Tensor value = at::empty(shape);
    const double inputs =
        shape.empty() ? 1.0 : static_cast<double>(value.numel()) / static_cast<double>(shape[0]);
    const double bound = 1 / std::sqrt(inputs);
    values.push_back(value.uniform_(-bound, bound));
  }
  return values;
}

std::unique_ptr<Model> make_model(const WorkloadOptions& options,
                                  const std::vector<at::Tensor>& values, int rank) {
  if (!options.compute) return std::make_unique<SilentNetwork>(values, rank);
  if (options.set.name != "mnist")
    throw std::invalid_argument("there is no network with the parameters of " + options.set.name);
  return std::make_unique<ConvolutionalNetwork>(values, rank, options.batch_size);
}

}  // namespace hvd::bench
