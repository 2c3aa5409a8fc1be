#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace hvd::bench {

/// ResNet-50 (He et al. 2015), with the stride in the 3x3 convolution as torchvision has it: 161
/// parameter tensors, 25.6 million elements.
class ResNet50Impl : public torch::nn::Module {
 public:
  ResNet50Impl();
  /// @param images [N, 3, H, W]
  /// @return [N, 1000]
  torch::Tensor forward(torch::Tensor images);

 private:
  torch::nn::Conv2d conv_;
  torch::nn::BatchNorm2d norm_;
  torch::nn::Sequential stages_;
  torch::nn::Linear classify_;
};
TORCH_MODULE(ResNet50);

}  // namespace hvd::bench
