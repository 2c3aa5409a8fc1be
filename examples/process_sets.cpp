// An ensemble of two models. The first half of the ranks trains one model and the second half the
// other, at the same time; each half is a process set. Then the members of both halves exchange
// their predictions.
//   hvdrun -np 4 build/release/examples/process_sets
// The data are synthetic: points of a sine wave with noise, which differ by rank.

#include <hvd/torch.h>

#include <cstdio>
#include <numeric>
#include <vector>

#include "equal_on_ranks.h"

namespace {

namespace nn = torch::nn;

void train(nn::Sequential& model, const hvd::ProcessSet& mine) {
  // The root is a world rank: the first member of the set.
  hvd::broadcast_parameters(model, mine.ranks().front(), mine);
  torch::optim::Adam adam(model->parameters(), /*lr=*/0.01);
  hvd::DistributedOptimizer optimizer(adam, model, {.process_set = mine});
  for (int step = 0; step < 200; ++step) {
    const torch::Tensor x = 6 * torch::rand({32, 1}) - 3;
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), x.sin() + 0.1 * torch::randn({32, 1})).backward();
    optimizer.step();
  }
}

int run() {
  std::vector<int> first(hvd::size() / 2), second(hvd::size() - hvd::size() / 2);
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), hvd::size() / 2);
  // Every rank of the job adds both sets, in the same order.
  const hvd::ProcessSet first_half = hvd::add_process_set(first);
  const hvd::ProcessSet second_half = hvd::add_process_set(second);
  const hvd::ProcessSet& mine = first_half.included() ? first_half : second_half;

  torch::manual_seed(1 + hvd::rank());
  nn::Sequential model(nn::Linear(1, 32), nn::Tanh(), nn::Linear(32, 1));
  train(model, mine);

  const torch::NoGradGuard no_grad;
  const torch::Tensor x = torch::linspace(-3, 3, 100).unsqueeze(1);
  // One prediction of each model: the first ranks of the two sets send theirs to all ranks.
  const torch::Tensor predicted = model->forward(x);
  const torch::Tensor a = hvd::broadcast(predicted, first.front());
  const torch::Tensor b = hvd::broadcast(predicted, second.front());
  const auto error = [&x](const torch::Tensor& y) {
    return torch::mse_loss(y, x.sin()).item<double>();
  };
  const bool equal = equal_on_ranks(model->parameters(), mine);
  const bool all_equal =
      hvd::allreduce(torch::tensor(equal), {.op = hvd::ReduceOp::kMin}).item<bool>();
  if (hvd::rank() == 0) {
    std::printf("errors: first model %.5f, second model %.5f, their mean %.5f\n", error(a),
                error(b), error((a + b) / 2));
    std::printf("weights are %s within each set, and %s between the sets\n",
                all_equal ? "equal" : "different", a.equal(b) ? "equal" : "different");
  }
  return all_equal ? 0 : 1;
}

}  // namespace

int main() {
  hvd::init();
  if (hvd::size() < 2) {
    std::fprintf(stderr, "process_sets needs at least two ranks: hvdrun -np 4 process_sets\n");
    return 1;
  }
  const int result = run();
  hvd::shutdown();
  return result;
}
