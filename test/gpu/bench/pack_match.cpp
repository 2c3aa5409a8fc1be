#include "gpu/bench/pack_match.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "bench/parameter_sets.h"
#include "bench/statistics.h"
#include "gpu/bench/pack_call.h"

namespace hvd::bench {
namespace {

constexpr int kRepeats = 20;  ///< between two events
constexpr int kWarmUp = 3;
constexpr double kFactor = 0.5;  ///< dividing by two and multiplying by a half give the same bits
constexpr double kTarget = 1.2;

struct Samples {
  std::vector<double> device;
  std::vector<double> host;
};

Json describe(const char* name, const Samples& samples, double bytes) {
  const double device_us = percentile(samples.device, 0.5);
  return {{"part", "pack"},
          {"model", "resnet50"},
          {"contender", name},
          {"samples", samples.device.size()},
          {"device_us", device_us},
          {"device_us_p95", percentile(samples.device, 0.95)},
          {"host_us", percentile(samples.host, 0.5)},
          {"bytes", bytes},
          {"read_and_written_gb_s", 2 * bytes / device_us / 1000}};
}

void print(const Json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace

bool run_pack_match(torch::Device device, double seconds) {
  std::vector<torch::Tensor> gradients;
  std::vector<PackCall::Tensor> tensors;
  std::vector<std::uint64_t> counts;
  torch::manual_seed(1);
  for (const Shape& shape : parameter_set("resnet50").shapes) {
    gradients.push_back(torch::randn(shape).to(device));
    counts.push_back(static_cast<std::uint64_t>(gradients.back().numel()));
    tensors.push_back({gradients.back().mutable_data_ptr(), counts.back()});
  }
  const std::vector<std::uint64_t> offsets = PackCall::offsets(counts);
  const auto zeros = [&] {
    return torch::zeros({static_cast<std::int64_t>(offsets.back())}, device);
  };
  const torch::Tensor theirs = zeros();
  const torch::Tensor ours = zeros();
  std::vector<torch::Tensor> views;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    views.push_back(theirs.narrow(0, static_cast<std::int64_t>(offsets[i]), gradients[i].numel())
                        .view(gradients[i].sizes()));
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
  PackCall pack(device.index(), tensors, ours.mutable_data_ptr(), stream.native_handle());

  const std::vector<std::function<void()>> calls = {[&] {
                                                      at::_foreach_copy_(views, gradients);
                                                      at::_foreach_div_(views, 1 / kFactor);
                                                    },
                                                    [&] { pack.run(kFactor); }};
  std::vector<Samples> samples(calls.size());
  std::vector<std::size_t> order = {0, 1};
  std::mt19937 random(1);
  for (int i = 0; i < kWarmUp; ++i) {
    for (const auto& call : calls) pack.time(kRepeats, call);
  }
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (samples[0].device.size() < 20 || std::chrono::steady_clock::now() < limit) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t which : order) {
      const PackCall::Times times = pack.time(kRepeats, calls[which]);
      samples[which].device.push_back(times.device);
      samples[which].host.push_back(times.host);
    }
  }
  const auto bytes = static_cast<double>(offsets.back() * sizeof(float));
  print(describe("_foreach_copy_ and _foreach_div_", samples[0], bytes));
  Json line = describe("pack and scale", samples[1], bytes);
  const double times_as_fast = 1 / median_ratio(samples[1].device, samples[0].device);
  line["times_as_fast"] = times_as_fast;
  line["target"] = kTarget;
  line["reached"] = times_as_fast >= kTarget;
  const bool same = torch::equal(ours, theirs);
  line["same_result"] = same;
  print(line);
  return same;
}

}  // namespace hvd::bench
