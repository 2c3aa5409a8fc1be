// Measures an allreduce of GPU tensors: the host's time until it is queued, and the time until the
// result is complete. If ranks share a GPU, it goes through the host's memory, and the steps of
// that path are measured too: a copy to the host, a copy back, and an allreduce of host memory.
// Rank 0 writes a line of JSON per measurement. Usage: mpirun -np N gpu_job_bench [SECONDS]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/session.h"
#include "bench/statistics.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/hvd.h"
#include "hvd/memory.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 10;
/// Untimed repetitions before each timed one, because other measurements have ended the schedule.
constexpr int kLead = 2;

void require(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

/// Kind of memory: of the GPU, pinned on the host, or shared by the host's ranks.
enum class Where { kGpu, kPinned, kShared };

std::shared_ptr<std::byte> memory(Where where, std::size_t bytes) {
  if (where == Where::kShared) return allocate_shared(bytes);
  void* found = nullptr;
  if (where == Where::kPinned) {
    require(cudaHostAlloc(&found, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    return {static_cast<std::byte*>(found), [](std::byte* mine) { cudaFreeHost(mine); }};
  }
  require(cudaMalloc(&found, bytes), "cudaMalloc");
  return {static_cast<std::byte*>(found), [](std::byte* mine) { cudaFree(mine); }};
}

class Bench {
 public:
  Bench(const Session& session, double seconds) : session_(session), seconds_(seconds) {
    require(cudaSetDevice(*gpu_index()), "cudaSetDevice");
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
            "cudaStreamCreateWithFlags");
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() { cudaStreamDestroy(stream_); }

  /// Measures the host's time per bucket from submission until everything is queued, in steps that
  /// repeat. The buckets are those of DistributedOptimizer: tensors in parts, which hvd packs and
  /// unpacks. No step waits for the GPU.
  void host_time() {
    constexpr std::size_t kBuckets = 5;
    constexpr std::size_t kBytes = 20 << 20;
    constexpr std::size_t kPartsPerBucket = 32;
    std::vector<Submission> submissions;
    std::vector<std::vector<TensorPart>> parts(kBuckets);
    for (std::size_t i = 0; i < kBuckets; ++i) {
      submissions.push_back(describe("bucket " + std::to_string(i), kBytes, Where::kGpu));
      parts[i] = cut(submissions.back(), kPartsPerBucket);
      submissions.back().parts = parts[i];
    }
    std::vector<Operation> operations(kBuckets);
    const auto step = [&] {
      const EventPtr filled = record_event(stream_);
      for (Submission& submission : submissions) submission.input_ready = filled;
      submit_all(submissions, operations, Progress::kCaller);
      for (const Operation& operation : operations) finish(operation);
    };
    std::vector<double> samples;
    for (int i = 0; i < kWarmUp; ++i) step();
    for (int i = 0; i < 500; ++i) {
      require(cudaStreamSynchronize(stream_),
              "a step");  // otherwise the queue would fill and the launch would block
      session_.align();
      const auto begin = Clock::now();
      step();
      samples.push_back(microseconds_since(begin) / kBuckets);
    }
    const Summary own = summarize(samples);
    session_.slowest(samples);
    const Summary slowest = summarize(samples);
    report({{"what", "host time per bucket"},
            {"buckets", kBuckets},
            {"bytes", kBytes},
            {"parts", kPartsPerBucket},
            {"p50_us", own.p50},
            {"p95_us", own.p95},
            {"slowest_rank_p50_us", slowest.p50}});
  }

  void allreduces(std::size_t bytes) {
    Contenders contenders;
    contenders.push_back({"hvd", reduce("gpu", bytes, Where::kGpu), {}});
    const auto host = memory(Where::kPinned, bytes);
    const auto device = memory(Where::kGpu, bytes);
    contenders.push_back(
        {"copy to the host", copy(host, device, bytes, cudaMemcpyDeviceToHost), {}});
    contenders.push_back(
        {"copy to the device", copy(device, host, bytes, cudaMemcpyHostToDevice), {}});
    if (session_.size() > 1)
      contenders.push_back(
          {"hvd, shared host memory", reduce("shared", bytes, Where::kShared), {}});
    measure(contenders);
    const std::vector<double>& ours = contenders.front().samples;
    std::vector<double> slowest_part(ours.size(), 0.0);
    for (auto one = contenders.begin() + 1; one != contenders.end(); ++one) {
      for (std::size_t i = 0; i < ours.size(); ++i)
        slowest_part[i] = std::max(slowest_part[i], one->samples[i]);
    }
    for (const Contender& one : contenders) {
      const Summary summary = summarize(one.samples);
      Json line = {{"what", one.name},
                   {"bytes", bytes},
                   {"times", summary.samples},
                   {"p50_us", summary.p50},
                   {"p95_us", summary.p95}};
      if (&one == &contenders.front())
        line["of_the_slowest_part"] = median_ratio(ours, slowest_part);
      report(std::move(line));
    }
  }

 private:
  struct Contender {
    std::string name;
    std::function<void()> run;
    std::vector<double> samples;  // microseconds, of the slowest rank
  };
  using Contenders = std::vector<Contender>;

  static double microseconds_since(Clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }

  /// Makes a submission of zeros, so that repeated sums stay finite.
  Submission describe(const std::string& name, std::size_t bytes, Where where) {
    const auto own = memory(where, bytes);
    if (where == Where::kGpu) {
      require(cudaMemsetAsync(own.get(), 0, bytes, stream_), "cudaMemsetAsync");
    } else {
      std::fill_n(own.get(), bytes, std::byte{});
    }
    const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
    const Device device = where == Where::kGpu ? Device{DeviceType::kCuda, *gpu_index()} : Device{};
    Submission submission;
    submission.name = name + "." + std::to_string(bytes);
    submission.input = submission.output = {own.get(), count, DataType::kFloat32, device, {count}};
    submission.alone = true;
    submission.keep_alive = own;
    return submission;
  }

  /// Cuts the tensor into parts of equal length. The submission's views keep the shape, but only
  /// the parts refer to the memory.
  static std::vector<TensorPart> cut(Submission& submission, std::size_t count) {
    const std::int64_t elements = submission.input.count;
    std::vector<TensorPart> parts;
    for (std::size_t i = 0; i < count; ++i) {
      const auto first = elements * static_cast<std::int64_t>(i) / static_cast<std::int64_t>(count);
      const auto end =
          elements * static_cast<std::int64_t>(i + 1) / static_cast<std::int64_t>(count);
      parts.push_back({submission.input.data + first * sizeof(float), first, end - first});
    }
    submission.input.data = submission.output.data = nullptr;
    return parts;
  }

  void finish(const Operation& operation) const {
    operation.wait();
    operation.status().raise_if_error();
    wait_for_event(stream_, operation.output_ready());
  }

  std::function<void()> reduce(const std::string& name, std::size_t bytes, Where where) {
    return [this, submission = describe(name, bytes, where), where]() mutable {
      if (where == Where::kGpu) submission.input_ready = record_event(stream_);
      finish(submit(submission, Progress::kCaller));
      require(cudaStreamSynchronize(stream_), "an allreduce");
    };
  }

  std::function<void()> copy(const std::shared_ptr<std::byte>& to,
                             const std::shared_ptr<std::byte>& from, std::size_t bytes,
                             cudaMemcpyKind kind) {
    return [this, to, from, bytes, kind] {
      require(cudaMemcpyAsync(to.get(), from.get(), bytes, kind, stream_), "cudaMemcpyAsync");
      require(cudaStreamSynchronize(stream_), "a copy");
    };
  }

  double time(const Contender& contender) const {
    for (int i = 0; i < kLead; ++i) contender.run();
    session_.align();
    session_.align();
    const auto begin = Clock::now();
    contender.run();
    return microseconds_since(begin);
  }

  void measure(Contenders& contenders) const {
    double round = 0;
    for (int i = 0; i < kWarmUp; ++i) {
      const auto begin = Clock::now();
      for (const Contender& contender : contenders) time(contender);
      round = session_.slowest(microseconds_since(begin) / 1e6);
    }
    const int repetitions =
        repetitions_for(round, {.budget_seconds = seconds_, .least = 20, .most = 1000});
    std::mt19937 random(1);  // the same on every rank
    std::vector<Contender*> order;
    for (Contender& contender : contenders) order.push_back(&contender);
    for (int i = 0; i < repetitions; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      for (Contender* const contender : order) contender->samples.push_back(time(*contender));
    }
    for (Contender& contender : contenders) session_.slowest(contender.samples);
  }

  void report(Json line) const {
    if (session_.rank() != 0) return;
    line["ranks"] = session_.size();
    std::cout << line.dump() << std::endl;
  }

  const Session& session_;
  const double seconds_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace
}  // namespace hvd::bench

int main(int argc, char** argv) {
  try {
    const hvd::bench::Session session({});
    if (!hvd::gpu_index()) {
      if (session.rank() == 0) std::printf("skipped: no GPU\n");
      return 0;
    }
    hvd::bench::Bench bench(session, argc > 1 ? std::atof(argv[1]) : 2.0);
    bench.host_time();
    for (const std::size_t megabytes : {1, 4, 16, 64}) bench.allreduces(megabytes << 20);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_job_bench: %s\n", error.what());
    return 1;
  }
}
