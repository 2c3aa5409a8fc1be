#include <hvd/torch.h>

#include <cstdio>
#include <exception>

int main() {
  try {
    hvd::init();
    const torch::Tensor sum =
        hvd::allreduce(torch::ones({3}), {.name = "ones", .op = hvd::ReduceOp::kSum});
    if (!sum.equal(torch::full({3}, hvd::size())))
      throw hvd::Error("the sum of ones is not the size");
    hvd::shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torch_consumer: %s\n", error.what());
    return 1;
  }
  std::puts("torch_consumer: ok");
  return 0;
}
