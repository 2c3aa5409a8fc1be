// An elastic job without LibTorch: fits a line to points. Ranks may die and join while it runs, and
// the others keep what they have learned.
//   hvdrun -np 2 --min-np 1 build/release/examples/elastic
// Kill one of the processes, and see the others go on. It also runs under 'hvdrun -np 2' and alone.

#include <hvd/collectives.h>
#include <hvd/elastic.h>
#include <hvd/hvd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>

namespace {

constexpr int kPoints = 1000;
constexpr int kSteps = 500;

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
                  hvd::Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
}

void train(std::chrono::milliseconds pause) {
  // The variables that the steps change and continue with.
  int step = 0;
  double slope = 0, offset = 0, loss = 0;

  hvd::elastic::State state;
  state.track("step", step).track("slope", slope).track("offset", offset).track("loss", loss);
  state.on_change([&](const hvd::elastic::Change& change) {
    if (change.new_rank == 0)
      std::printf("step %d: %d -> %d ranks\n", step, change.old_size, change.new_size);
  });

  // Entered again after each change of the ranks, with the state of the last commit.
  hvd::elastic::run(state, [&] {
    while (step < kSteps) {
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
      ++step;
      state.commit();
      std::this_thread::sleep_for(pause);
    }
  });
  if (hvd::rank() == 0) {
    std::printf("y = %.4f x + %.4f, loss %.2e, on %d ranks\n", slope, offset, loss, hvd::size());
  }
}

}  // namespace

/// @param argv the first argument is the pause after each step in milliseconds, to have time to
/// kill
int main(int argc, char** argv) {
  try {
    hvd::init();
    train(std::chrono::milliseconds(argc > 1 ? std::atoi(argv[1]) : 0));
    hvd::shutdown();
    return 0;
  } catch (const hvd::Error& error) {
    std::fprintf(stderr, "elastic: %s\n", error.what());
    return 1;
  }
}
