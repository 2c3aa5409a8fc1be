#include "bench/commands.h"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>

#include <array>
#include <chrono>
#include <ostream>
#include <string>
#include <vector>

#include "bench/step_contender.h"
#include "hvd/torch/operations.h"
#include "hvd/torch/sync_batch_norm.h"
#include "layers/layer_exchange.h"

namespace hvd::bench {
namespace {

struct Size {
  std::int64_t channels = 0;
  std::int64_t side = 0;
};
// The first layer of ResNet-50, and the widest layer of each of its stages.
constexpr std::array<Size, 5> kSizes = {{{64, 112}, {256, 56}, {512, 28}, {1024, 14}, {2048, 7}}};

/// Number of values that one rank contributes to the statistics: the count, and the mean and the
/// squared deviations of each channel.
std::int64_t forward_values(const Size& size) { return 2 * size.channels + 1; }
/// The sums of the gradient, and of its product with the normalized input.
std::int64_t backward_values(const Size& size) { return 2 * size.channels; }

/// The contenders at one size. Each one runs several times in a row, the first times untimed,
/// because hvd replays steps only after they have been repeated.
class Layer {
 public:
  Layer(const Session& session, const LayersOptions& options, Size size)
      : session_(session),
        size_(size),
        joined_(SyncBatchNorm2d(size.channels)),
        local_(torch::nn::BatchNorm2d(size.channels)),
        exchange_("bench.layer" + std::to_string(size.channels), ProcessSet()),
        forward_row_(torch::zeros({1, forward_values(size) + 1})),
        backward_sums_(torch::zeros({2, size.channels})),
        peer_forward_(static_cast<std::size_t>(forward_values(size))),
        peer_backward_(static_cast<std::size_t>(backward_values(size))) {
    torch::manual_seed(1 + session.rank());
    input_ = torch::randn({options.batch_size, size.channels, size.side, size.side});
    gradient_ = torch::randn_like(input_);
    input_.requires_grad_();
  }

  void run_joined() { run(joined_); }
  void run_local() { run(local_); }

  /// Exchanges the same values as the layer, in the same way.
  void run_exchange() {
    exchange_.gathered(forward_row_);
    exchange_.summed(backward_sums_);
  }

  void run_peer() {
    sum(peer_forward_);
    sum(peer_backward_);
  }

  /// Whether the joined layer's output and gradient equal those of BatchNorm on the batches of all
  /// ranks together.
  bool correct() {
    const torch::Tensor all = allgather(input_.detach(), {.name = "bench.inputs"});
    const torch::Tensor all_gradients = allgather(gradient_, {.name = "bench.gradients"});
    torch::nn::BatchNorm2d whole(size_.channels);
    torch::Tensor whole_input = all.clone().requires_grad_();
    const torch::Tensor expected = whole(whole_input);
    expected.backward(all_gradients);
    input_.mutable_grad().reset();
    const torch::Tensor output = joined_(input_);
    output.backward(gradient_);
    const std::int64_t samples = input_.size(0);
    const auto mine = [&](const torch::Tensor& tensor) {
      return tensor.narrow(0, session_.rank() * samples, samples);
    };
    return session_.all(torch::allclose(output, mine(expected), 1e-3, 1e-4) &&
                        torch::allclose(input_.grad(), mine(whole_input.grad()), 1e-3, 1e-4));
  }

  template <class Run>
  double seconds(const Run& run) {
    session_.align();
    const auto begin = std::chrono::steady_clock::now();
    run();
    return seconds_since(begin);
  }

 private:
  template <class Module>
  void run(Module& module) {
    input_.mutable_grad().reset();
    module(input_).backward(gradient_);
  }

  void sum(std::vector<float>& values) {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                  session_.peers());
  }

  const Session& session_;
  const Size size_;
  SyncBatchNorm2d joined_;
  torch::nn::BatchNorm2d local_;
  torch::Tensor input_, gradient_;
  libtorch::LayerExchange exchange_;
  torch::Tensor forward_row_, backward_sums_;
  std::vector<float> peer_forward_, peer_backward_;
};

struct Samples {
  std::vector<double> joined, local, exchange, peer, parts;
};

void run_once_each(Layer& layer, const Session& session, Samples& samples) {
  constexpr int kUntimed = 8, kTimed = 10;
  const auto turn = [&](std::vector<double>& into, const auto& run) {
    std::vector<double> times;
    for (int i = 0; i < kUntimed; ++i) layer.seconds(run);
    for (int i = 0; i < kTimed; ++i) times.push_back(layer.seconds(run));
    session.slowest(times);
    into.push_back(percentile(times, 0.5));
  };
  turn(samples.joined, [&] { layer.run_joined(); });
  turn(samples.local, [&] { layer.run_local(); });
  turn(samples.exchange, [&] { layer.run_exchange(); });
  turn(samples.peer, [&] { layer.run_peer(); });
  samples.parts.push_back(samples.local.back() + samples.exchange.back());
}

Json measure(const Session& session, const LayersOptions& options, const Size& size) {
  Layer layer(session, options, size);
  const bool correct = layer.correct();
  Samples samples;
  const auto begin = std::chrono::steady_clock::now();
  run_once_each(layer, session, samples);
  const int repetitions =
      repetitions_for(session.slowest(seconds_since(begin)), options.repetitions);
  samples = {};
  for (int i = 0; i < repetitions; ++i) run_once_each(layer, session, samples);
  const auto microseconds = [](const std::vector<double>& seconds) {
    return json_number(percentile(seconds, 0.5) * 1e6);
  };
  return {{"channels", size.channels},
          {"side", size.side},
          {"batch", options.batch_size},
          {"repetitions", repetitions},
          {"correct", correct},
          {"layer_us", microseconds(samples.joined)},
          {"batch_norm_us", microseconds(samples.local)},
          {"exchange_us", microseconds(samples.exchange)},
          {"mpi_us", microseconds(samples.peer)},
          {"exchange_over_mpi", json_number(median_ratio(samples.exchange, samples.peer))},
          {"layer_over_parts", json_number(median_ratio(samples.joined, samples.parts))}};
}

}  // namespace

Json run_layers(const Session& session, const LayersOptions& options, std::ostream& out) {
  share_out_threads(options.threads);
  Json rows = Json::array();
  bool correct = true;
  Table table({"input", "times", "layer us", "BatchNorm us", "exchange us", "MPI us",
               "exchange / MPI", "layer / (BatchNorm + exchange)", "result"});
  for (const Size& size : kSizes) {
    const Json row = measure(session, options, size);
    const auto number = [&](const char* key) {
      return number_text(row[key].is_null() ? 0 : row[key].get<double>());
    };
    table.add({std::to_string(options.batch_size) + " x " + std::to_string(size.channels) + " x " +
                   std::to_string(size.side) + "^2",
               std::to_string(row["repetitions"].get<int>()), number("layer_us"),
               number("batch_norm_us"), number("exchange_us"), number("mpi_us"),
               number("exchange_over_mpi"), number("layer_over_parts"),
               row["correct"].get<bool>() ? "ok" : "WRONG"});
    correct = correct && row["correct"].get<bool>();
    rows.push_back(row);
  }
  if (session.rank() == 0) {
    out << "SyncBatchNorm2d, forward and backward, one layer alone\n";
    table.print(out);
  }
  return {{"correct", correct}, {"rows", rows}};
}

}  // namespace hvd::bench
