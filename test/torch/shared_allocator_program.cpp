// Programs for shared_allocator_process_test that end while tensors exist, and programs that train.
#include <hvd/memory.h>
#include <hvd/torch.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr std::int64_t kLarge = 300'000;

bool has(const torch::Tensor& tensor, double value) { return (tensor == value).all().item<bool>(); }

/// Destroyed after all other objects.
struct Survivor {
  torch::Tensor tensor;
  ~Survivor() {
    if (!tensor.defined()) return;
    const bool kept = has(tensor, 5);
    tensor.add_(1);
    const torch::Tensor later = tensor.clone();
    std::fprintf(stderr, "%s\n", kept && has(later, 6) ? "SURVIVED" : "LOST");
  }
};
Survivor survivor;
torch::Tensor plain;

/// Trains, whatever kind of memory each rank has. Returns whether all ranks have equal parameters.
bool train() {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(300, 300), torch::nn::Linear(300, 10));
  hvd::broadcast_parameters(net);
  torch::optim::SGD sgd(net->parameters(), 0.01);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    net->forward(torch::full({4, 300}, 0.1 * (hvd::rank() + 1 + step))).square().mean().backward();
    optimizer.step();
  }
  double difference = 0;
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor most = hvd::allreduce(parameter.detach(), {.op = hvd::ReduceOp::kMax});
    difference += (most - parameter.detach()).abs().max().item<double>();
  }
  return difference == 0;
}

/// Makes hvd request shared memory while no file may be as large as an arena.
void refuse_shared_memory() {
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  if (hvd::has_shared_memory()) std::abort();
  ::setrlimit(RLIMIT_FSIZE, &before);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string way = argc > 1 ? argv[1] : "";
  torch::set_num_threads(1);
  if (way == "refused") refuse_shared_memory();
  hvd::init();
  survivor.tensor = torch::full({kLarge}, 5, torch::kFloat32);
  plain = torch::full({kLarge}, 1, torch::kFloat32);
  std::fprintf(stderr, "%s\n",
               hvd::is_shared(plain.data_ptr(), plain.nbytes()) ? "SHARED" : "ORDINARY");
  hvd::allreduce_(plain, {.name = "plain", .op = hvd::ReduceOp::kSum});
  if (!has(plain, hvd::size()) || !train()) return 1;
  for (int i = 0; i < 3; ++i) torch::ones({kLarge + i});
  if (way == "exit without shutdown") std::exit(0);
  hvd::shutdown();
  if (!has(survivor.tensor, 5) || !has(plain + 1, plain[0].item<double>() + 1)) return 1;
  if (way == "exit") std::exit(0);
  return 0;
}
