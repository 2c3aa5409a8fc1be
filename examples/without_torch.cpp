// Data-parallel training without LibTorch: fits a line to points that are divided among the ranks.
// It needs hvd::core only. c_interface.c is the same program in C.
//   hvdrun -np 2 build/release/examples/without_torch

#include <hvd/collectives.h>
#include <hvd/hvd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

namespace {

constexpr int kPoints = 1000;

/// Adds up the values of all ranks, in place.
void sum_over_ranks(const std::string& name, std::span<double> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const hvd::TensorView view{.data = reinterpret_cast<std::byte*>(values.data()),
                             .count = count,
                             .dtype = hvd::DataType::kFloat64,
                             .shape = {count}};
  const hvd::Operation operation =
      hvd::submit({.name = name,
                   .parameters = hvd::Allreduce{.op = hvd::ReduceOp::kSum},
                   .input = view,
                   .output = view},
                  hvd::Progress::kCaller);  // this thread waits, and may do the work
  operation.wait();
  operation.status().raise_if_error();
}

void train() {
  double slope = 0, offset = 0, loss = 0;
  for (int step = 0; step < 500; ++step) {
    std::array<double, 3> sums = {};  // of the derivatives by slope and offset, and of the losses
    for (int i = hvd::rank(); i < kPoints; i += hvd::size()) {
      const double x = static_cast<double>(i) / kPoints;
      const double error = slope * x + offset - (3 * x - 1);
      sums[0] += 2 * error * x;
      sums[1] += 2 * error;
      sums[2] += error * error;
    }
    sum_over_ranks("gradient", sums);
    slope -= 0.5 * sums[0] / kPoints;
    offset -= 0.5 * sums[1] / kPoints;
    loss = sums[2] / kPoints;
  }
  if (hvd::rank() == 0) {
    std::printf("y = %.4f x + %.4f, loss %.2e, on %d ranks\n", slope, offset, loss, hvd::size());
  }
}

}  // namespace

int main() {
  try {
    hvd::init();
    train();
    hvd::shutdown();
    return 0;
  } catch (const hvd::Error& error) {
    std::fprintf(stderr, "without_torch: %s\n", error.what());
    return 1;
  }
}
