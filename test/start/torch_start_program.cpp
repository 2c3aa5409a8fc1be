// torch_start_program agent | store PATH RANK SIZE: one rank of a job of LibTorch programs that
// joins twice in the store of torchrun's agent, or in a c10d::FileStore. Prints "OK rank size
// local_rank controller init_method" after each job, or the text of an exception.
#include <hvd/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace {

void work() {
  for (int i = 0; i < 20; ++i) {
    const torch::Tensor sum = hvd::allreduce(torch::full({1000}, hvd::rank() + 1.0),
                                             {.name = "sum", .op = hvd::ReduceOp::kSum});
    const int size = hvd::size();
    TORCH_CHECK(sum[999].item<double>() == size * (size + 1) / 2, "wrong sum ", sum[999]);
  }
  std::printf("OK %d %d %d %s %s\n", hvd::rank(), hvd::size(), hvd::local_rank(),
              hvd::controller().c_str(), hvd::init_method().c_str());
  hvd::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const bool own_store = argc == 5 && std::string(argv[1]) == "store";
  try {
    for (int job = 0; job < 2; ++job) {
      if (own_store) {
        const int size = std::atoi(argv[4]);
        hvd::init(c10::make_intrusive<c10d::FileStore>(argv[2], size), std::atoi(argv[3]), size);
      } else {
        hvd::init();
      }
      work();
    }
  } catch (const std::exception& error) {
    std::printf("Error %s\n", error.what());
    return 1;
  }
  return 0;
}
