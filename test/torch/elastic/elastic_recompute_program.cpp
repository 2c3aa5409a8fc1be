// Computes the losses of elastic_training_program (words plain, global) anew, with LibTorch alone,
// from the samples that its ranks have printed. stdin: a line `COMMIT SAMPLE...` for each step.
// Prints `loss COMMIT VALUE` for each, as that program does.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

int main() {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  torch::nn::Linear first(6, 16), second(16, 3);
  torch::manual_seed(7);
  const torch::Tensor inputs = torch::randn({90, 6});
  const torch::Tensor targets = torch::randint(3, {90}, torch::kInt64);
  std::vector<torch::Tensor> parameters = first->parameters();
  for (const torch::Tensor& parameter : second->parameters()) parameters.push_back(parameter);
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::StepLR scheduler(sgd, 4, 0.8);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    long long commit = 0;
    words >> commit;
    std::vector<std::int64_t> samples;
    for (std::int64_t sample = 0; words >> sample;) samples.push_back(sample);
    const torch::Tensor rows = torch::tensor(samples, torch::kInt64);
    sgd.zero_grad();
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        second(torch::tanh(first(inputs.index_select(0, rows)))), targets.index_select(0, rows));
    loss.backward();
    sgd.step();
    scheduler.step();
    std::printf("loss %lld %a\n", commit, loss.item<double>());
  }
  return 0;
}
