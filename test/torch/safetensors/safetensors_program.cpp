#include <hvd/torch.h>
#include <torch/script.h>

#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "torch/safetensors/safetensors_support.h"

// The C++ half of safetensors_python_test.py and safetensors_hostile_test.py. Each command reads
// files of Python and writes files that Python compares:
//
//     tensors IN OUT          every tensor, with the file's metadata
//     layers IN OUT           into LayersImpl and out of it
//     tied IN OUT             into TiedImpl and out of it
//     script MODULE IN OUT    into an exported module, out of it, and the module to OUT.pt
//     probe LIST GOOD         reads each path in LIST, one a line, in every way; see probe()
//
// Several commands may follow each other.

namespace {

/// Layers whose parameters and buffers have the same names and shapes in Python.
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    namespace nn = torch::nn;
    register_module("linear", nn::Linear(3, 4));
    register_module("no_bias", nn::Linear(nn::LinearOptions(3, 4).bias(false)));
    register_module("bilinear", nn::Bilinear(2, 3, 4));
    register_module("conv1", nn::Conv1d(2, 4, 3));
    register_module("conv2", nn::Conv2d(nn::Conv2dOptions(4, 4, 3).groups(2)));
    register_module("conv3", nn::Conv3d(1, 2, 3));
    register_module("transposed", nn::ConvTranspose2d(2, 3, 2));
    register_module("batch1", nn::BatchNorm1d(3));
    register_module("batch2", nn::BatchNorm2d(nn::BatchNorm2dOptions(3).affine(false)));
    register_module(
        "instance",
        nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true).track_running_stats(true)));
    register_module("layer_norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    register_module("group_norm", nn::GroupNorm(2, 4));
    register_module("embedding", nn::Embedding(5, 3));
    register_module("bag", nn::EmbeddingBag(5, 3));
    register_module("prelu", nn::PReLU());
    register_module("lstm", nn::LSTM(nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true)));
    register_module("gru", nn::GRU(3, 4));
    register_module("rnn", nn::RNN(3, 4));
    register_module("cell", nn::LSTMCell(3, 4));
    register_module("attention", nn::MultiheadAttention(4, 2));
    register_module("encoder", nn::TransformerEncoderLayer(4, 2));
    register_module("decoder", nn::TransformerDecoderLayer(4, 2));
    register_module("list", nn::Sequential(nn::Linear(2, 2), nn::ReLU(), nn::Linear(2, 1)));
    register_parameter("scale", torch::ones({2, 2}));
    register_buffer("mean", torch::zeros({3}, torch::kDouble));
  }
};
TORCH_MODULE(Layers);

using Arguments = std::vector<std::string>;

/// Sets all tensors to zero, so that the file must give every value.
void forget(const hvd::StateDict& tensors) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors.tensors()) torch::Tensor(tensor).zero_();
}

void transfer(const hvd::StateDict& tensors, const std::string& in, const std::string& out) {
  forget(tensors);
  hvd::load_safetensors(tensors, in);
  hvd::save_safetensors(tensors, out);
}

/// The error of `act`, which may only be a SafetensorsError; empty if there is none.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
    return {};
  } catch (const hvd::SafetensorsError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("NOT A SafetensorsError: ") + error.what();
  }
}

/// Reads a file as new tensors, tensor by tensor, and into `targets`. All three ways have to agree
/// about files that are damaged; an error must not change a target. Prints "ok" or the error, on
/// one line. A file that can be read is written to PATH.again.
void probe(const std::string& path, const std::map<std::string, torch::Tensor>& targets) {
  const std::string damaged = error_of([&] {
    hvd::save_safetensors(hvd::load_safetensors(path), path + ".again",
                          {.metadata = hvd::SafetensorsFile(path).metadata(), .durable = false});
  });
  const std::string by_tensor = error_of([&] {
    const hvd::SafetensorsFile file(path);
    for (const std::string& name : file.names()) file.tensor(name);
  });
  std::map<std::string, torch::Tensor> before;
  for (const auto& [name, tensor] : targets) before.emplace(name, tensor.clone());
  const std::string into = error_of([&] { hvd::load_safetensors(targets, path); });
  std::string line = damaged.empty() ? "ok" : damaged;
  if (damaged.empty() != by_tensor.empty()) line = "BY TENSOR: " + by_tensor;
  if (!damaged.empty() && into.empty()) line = "INTO TARGETS: no error";
  if (into.starts_with("NOT A")) line = into;
  for (const auto& [name, tensor] : targets)
    if (!into.empty() && !tensor.equal(before.at(name))) line = "AN ERROR CHANGED " + name;
  for (char& c : line)
    if (c == '\n') c = ' ';
  std::cout << line << '\n';
}

void run(const Arguments& arguments) {
  std::size_t next = 0;
  const auto take = [&] { return arguments.at(next++); };
  while (next < arguments.size()) {
    const std::string command = take();
    if (command == "tensors") {
      const std::string in = take();
      hvd::save_safetensors(hvd::load_safetensors(in), take(),
                            {.metadata = hvd::SafetensorsFile(in).metadata()});
    } else if (command == "layers") {
      const std::string in = take();
      transfer(Layers(), in, take());
    } else if (command == "tied") {
      const std::string in = take();
      transfer(hvd::testing::Tied(), in, take());
    } else if (command == "script") {
      const torch::jit::Module module = torch::jit::load(take());
      const std::string in = take(), out = take();
      transfer(module, in, out);
      module.save(out + ".pt");
    } else if (command == "probe") {
      std::ifstream list(take());
      const auto targets = hvd::load_safetensors(take());
      for (std::string path; std::getline(list, path);) probe(path, targets);
    } else {
      throw std::runtime_error("unknown command " + command);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
