#pragma once

#include <hvd/torch.h>

namespace hvd::testing {

/// A model whose first and last layer share their weight.
struct TiedImpl : torch::nn::Module {
  torch::nn::Embedding encoder{6, 4};
  torch::nn::Linear decoder{4, 6};

  TiedImpl() {
    register_module("encoder", encoder);
    register_module("decoder", decoder);
    decoder->weight.set_data(encoder->weight);
  }
};
TORCH_MODULE(Tied);

}  // namespace hvd::testing
