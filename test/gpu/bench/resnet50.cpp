#include "gpu/bench/resnet50.h"

#include <torch/nn/functional/pooling.h>
#include <torch/nn/init.h>

#include <cstdint>

namespace hvd::bench {
namespace {

namespace nn = torch::nn;

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                       std::int64_t stride) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

class BottleneckImpl : public nn::Module {
 public:
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride) {
    const std::int64_t out = 4 * width;
    narrow_ = register_module("narrow", convolution(in, width, 1, 1));
    narrow_norm_ = register_module("narrow_norm", nn::BatchNorm2d(width));
    middle_ = register_module("middle", convolution(width, width, 3, stride));
    middle_norm_ = register_module("middle_norm", nn::BatchNorm2d(width));
    widen_ = register_module("widen", convolution(width, out, 1, 1));
    widen_norm_ = register_module("widen_norm", nn::BatchNorm2d(out));
    nn::init::zeros_(
        widen_norm_->weight);  // a block begins as the identity, which stabilises the first steps
    if (stride == 1 && in == out) return;
    project_ = register_module(
        "project", nn::Sequential(convolution(in, out, 1, stride), nn::BatchNorm2d(out)));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = narrow_norm_(narrow_(x)).relu_();
    y = middle_norm_(middle_(y)).relu_();
    y = widen_norm_(widen_(y));
    y += project_ ? project_->forward(x) : x;
    return y.relu_();
  }

 private:
  nn::Conv2d narrow_{nullptr}, middle_{nullptr}, widen_{nullptr};
  nn::BatchNorm2d narrow_norm_{nullptr}, middle_norm_{nullptr}, widen_norm_{nullptr};
  nn::Sequential project_{nullptr};
};
TORCH_MODULE(Bottleneck);

nn::Sequential make_stages() {
  constexpr std::int64_t kBlocks[] = {3, 4, 6, 3};
  nn::Sequential stages;
  std::int64_t in = 64;
  std::int64_t width = 64;
  for (const std::int64_t blocks : kBlocks) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      stages->push_back(Bottleneck(in, width, block == 0 && width > 64 ? 2 : 1));
      in = 4 * width;
    }
    width *= 2;
  }
  return stages;
}

}  // namespace

ResNet50Impl::ResNet50Impl()
    : conv_(register_module(
          "conv", nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)))),
      norm_(register_module("norm", nn::BatchNorm2d(64))),
      stages_(register_module("stages", make_stages())),
      classify_(register_module("classify", nn::Linear(2048, 1000))) {
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const found = module->as<nn::Conv2d>())
      nn::init::kaiming_normal_(found->weight, 0, torch::kFanOut, torch::kReLU);
  }
}

torch::Tensor ResNet50Impl::forward(torch::Tensor images) {
  torch::Tensor x = norm_(conv_(images)).relu_();
  x = stages_->forward(torch::max_pool2d(x, 3, 2, 1));
  return classify_(x.mean({2, 3}));
}

}  // namespace hvd::bench
