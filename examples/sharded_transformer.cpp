// A small transformer that learns to reverse a row of digits. Adam's state, which is twice as large
// as the model, is sharded: each rank has a part of it, and writes that part to checkpoints.
//   hvdrun -np 2 build/release/examples/sharded_transformer
//   hvdrun -np 2 build/release/examples/sharded_transformer /tmp/checkpoints  # again: resumes

#include <hvd/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t kDigits = 10, kLength = 6, kWidth = 32;
constexpr std::uint64_t kSteps = 120;

struct ReverserImpl : nn::Module {
  nn::Embedding digits{kDigits, kWidth}, places{kLength, kWidth};
  nn::TransformerEncoder encoder{
      nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(kWidth, /*nhead=*/4)
                                        .dim_feedforward(4 * kWidth)
                                        .dropout(0),
                                    /*num_layers=*/2)};
  nn::Linear head{kWidth, kDigits};

  ReverserImpl() {
    register_module("digits", digits);
    register_module("places", places);
    register_module("encoder", encoder);
    register_module("head", head);
  }
  /// @param digits of shape [length, batch] @return scores of shape [length, batch, 10]
  torch::Tensor forward(const torch::Tensor& rows) {
    const torch::Tensor where = places->forward(torch::arange(rows.size(0))).unsqueeze(1);
    return head->forward(encoder->forward(digits->forward(rows) + where));
  }
};
TORCH_MODULE(Reverser);

/// The loss of a random batch, which differs by rank.
torch::Tensor loss_of_batch(Reverser& model) {
  const torch::Tensor rows = torch::randint(kDigits, {kLength, 32});
  const torch::Tensor scores = model->forward(rows).flatten(0, 1);
  return nn::functional::cross_entropy(scores, rows.flip(0).flatten());
}

bool same_everywhere(Reverser& model) {
  for (const torch::Tensor& parameter : model->parameters()) {
    const torch::Tensor all = hvd::allgather(parameter.detach().flatten().unsqueeze(0));
    if (!all.eq(all[0]).all().item<bool>()) return false;
  }
  return true;
}

int train(const char* folder) {
  torch::manual_seed(1);
  Reverser model;
  hvd::broadcast_parameters(model);
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(3e-3));
  hvd::ShardedOptimizer optimizer(adamw, model);  // instead of hvd::DistributedOptimizer

  std::uint64_t step = 0;
  hvd::TrainingState state;
  state.model(model).optimizer(optimizer).value("step", step);
  if (folder != nullptr) hvd::load_checkpoint(folder, state);  // saved by any number of ranks

  torch::manual_seed(100 * step + hvd::rank());
  while (step < kSteps) {
    optimizer.zero_grad();
    const torch::Tensor loss = loss_of_batch(model);
    loss.backward();
    optimizer.clip_grad_norm_(1.0);  // uses the norm over all ranks' parts
    optimizer.step();
    const auto mean = hvd::allreduce(loss.detach(), {.name = "loss"}).item<float>();
    ++step;
    if (step % 20 == 0 && hvd::rank() == 0)
      std::printf("step %3d  loss %.3f\n", static_cast<int>(step), mean);
    if (step % 40 == 0 && folder != nullptr)
      hvd::save_checkpoint(folder, state, {.step = step, .keep = 1});
  }

  const auto own = static_cast<double>(optimizer.state_bytes());
  const double all = hvd::allreduce(torch::tensor(own), {.op = hvd::ReduceOp::kSum}).item<double>();
  const double most =
      hvd::allreduce(torch::tensor(own), {.op = hvd::ReduceOp::kMax}).item<double>();
  const bool one_model = same_everywhere(model);
  if (hvd::rank() == 0)
    std::printf("%d ranks have %s, and at most %.0f %% of the state each\n", hvd::size(),
                one_model ? "one model" : "models that differ", all > 0 ? 100 * most / all : 0);
  return one_model ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  hvd::init();
  const int result = train(argc > 1 ? argv[1] : nullptr);
  hvd::shutdown();
  return result;
}
