#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

struct Bar {
  double begin = 0;
  double end = 0;
};

/// Returns each tensor's bars of one phase, ordered by time.
std::map<std::string, std::vector<Bar>> bars_of(const std::filesystem::path& path,
                                                const std::string& phase) {
  std::map<int, std::string> tensors;
  std::map<std::string, std::vector<Bar>> bars;
  const auto events = nlohmann::json::parse(std::ifstream(path));
  for (const auto& event : events) {
    if (event.at("name") == "thread_name") {
      tensors[event.at("tid")] = event.at("args").at("name").get<std::string>();
    }
  }
  for (const auto& event : events) {
    if (event.at("name") != phase) continue;
    const double begin = event.at("ts");
    bars[tensors.at(event.at("tid"))].push_back({begin, begin + event.at("dur").get<double>()});
  }
  return bars;
}

/// Returns all bars of a parameter. It is reduced alone in the first step, and later in a bucket
/// whose name begins or ends with it.
std::vector<Bar> bars_of_parameter(const std::map<std::string, std::vector<Bar>>& bars,
                                   const std::string& parameter) {
  std::vector<Bar> all;
  for (const auto& [tensor, found] : bars) {
    const bool in_bucket = tensor.find("[" + parameter + " ") != std::string::npos ||
                           tensor.find(" " + parameter + "]") != std::string::npos;
    if (in_bucket || tensor.ends_with("." + parameter)) {
      all.insert(all.end(), found.begin(), found.end());
    }
  }
  std::sort(all.begin(), all.end(), [](const Bar& a, const Bar& b) { return a.begin < b.begin; });
  return all;
}

TEST(Timeline, TheLastLayersAreReducedBeforeTheFirstGradientIsReady) {
  constexpr int kSteps = 6;
  constexpr int kWidth = 512;
  constexpr int kLayers = 8;
  const auto path = std::filesystem::temp_directory_path() /
                    ("hvd_overlap_" + std::to_string(::getpid()) + ".json");
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth));
  }
  broadcast_parameters(model);
  torch::optim::SGD inner(model->parameters(), 0.01);
  {
    DistributedOptimizer optimizer(inner, model->named_parameters());
    start_timeline(path.string() + "{rank}");
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      model->forward(torch::ones({512, kWidth}) * static_cast<double>(rank())).sum().backward();
      optimizer.step();
    }
    stop_timeline();
  }
  const std::filesystem::path own = path.string() + std::to_string(rank());
  const auto ready = bars_of(own, "NEGOTIATE");  // begins when the gradient is submitted
  const auto reduced = bars_of(own, "ALLREDUCE");
  std::filesystem::remove(own);
  const auto first = bars_of_parameter(ready, "layer0.weight");
  const auto last = bars_of_parameter(reduced, "layer7.weight");
  EXPECT_EQ(first.size(), static_cast<std::size_t>(kSteps));
  EXPECT_EQ(last.size(), static_cast<std::size_t>(kSteps));
  int overlapped = 0;
  for (std::size_t step = 0; step < std::min(first.size(), last.size()); ++step) {
    if (last[step].end < first[step].begin) ++overlapped;
  }
  // Not in all steps: if ranks share cores, the engine of one may not be scheduled in time.
  EXPECT_GE(overlapped, kSteps / 2) << "communication does not overlap with backward";
}

}  // namespace
}  // namespace hvd::testing
