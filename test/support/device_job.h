#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/nccl/nccl_backend.h"
#include "support/fake_nccl.h"
#include "support/job_helpers.h"
#include "support/local_job.h"
#include "support/nccl_launch.h"
#include "support/parameters.h"

/// Jobs whose ranks have a simulated GPU, stepped by one thread in virtual time.
namespace hvd::testing {

enum class Path { kNccl, kStaged };

/// A tensor on the GPU, written by the program's own queue.
template <class Element>
struct GpuTensor {
  std::byte* memory = nullptr;
  std::int64_t count = 0;
  TensorView view(DataType type) const {
    return {memory, count, type, {DeviceType::kCuda, 0}, {count}};
  }
};

/// Runs the function immediately, so that every run of a test is the same, but not on the thread
/// that drives the engines.
inline void run_on_another_thread(std::function<void()> function) {
  std::thread(std::move(function)).join();
}

class DeviceJob {
 public:
  struct Rank {
    std::shared_ptr<device::Context> device;
    std::unique_ptr<device::OwnedStream> app;  ///< where the program computes
  };

  DeviceJob(int size, Path path, runtime::RuntimeOptions runtime = {},
            const FakeNcclOptions& nccl = {}, std::uint64_t seed = 1,
            const nccl::NcclOptions& backend = {}, const DeviceMemory& memory = {})
      : gpu_({.seed = seed}), nccl_(gpu_, nccl) {
    LocalJobOptions options;
    options.size = size;
    options.seed = seed;
    options.runtime = std::move(runtime);
    options.runtime.background_thread = false;
    options.device = [this, memory](int rank) {
      const auto device = std::make_shared<device::Context>(
          gpu_.api(rank), 0,
          device::ContextDeps{.memory = memory, .run_on_helper = run_on_another_thread});
      ranks_.push_back({device, std::make_unique<device::OwnedStream>(*device)});
      return device;
    };
    if (path == Path::kNccl) {
      options.device_backend = [this, backend](int rank,
                                               const std::shared_ptr<device::Context>& device,
                                               const std::shared_ptr<Backend>& local) {
        return std::make_shared<NcclBackend>(
            with_launch_of_test(nccl_.library(rank), device), device,
            [local](const ChannelSpec& spec, Peers& peers) { return local->open(spec, peers); },
            backend, clock_);
      };
    }
    job_ = std::make_unique<LocalJob>(options, clock_);
  }

  /// Ends the runtimes; they must not be used afterwards.
  void end() {
    job_.reset();
    ranks_.clear();
  }

  int size() const { return job_->size(); }
  LocalJob& job() { return *job_; }
  runtime::Runtime& runtime(int rank) { return job_->rank(rank); }
  FakeGpu& gpu() { return gpu_; }
  FakeNccl& nccl() { return nccl_; }
  VirtualClock& clock() { return clock_; }
  Rank& rank(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  /// A tensor that the program's queue fills with these values, and the event that follows the
  /// copy.
  template <class Element>
  std::pair<GpuTensor<Element>, EventPtr> make(int rank, const std::vector<Element>& values) {
    Rank& one = ranks_[static_cast<std::size_t>(rank)];
    const device::DeviceGuard guard(one.device->api(), 0);
    const std::size_t bytes = values.size() * sizeof(Element);
    GpuTensor<Element> tensor{gpu_.allocate(bytes), static_cast<std::int64_t>(values.size())};
    write(rank, tensor, values);
    return {tensor, one.device->events()->record(one.app->get())};
  }
  template <class Element>
  void write(int rank, const GpuTensor<Element>& tensor, const std::vector<Element>& values) {
    Rank& one = ranks_[static_cast<std::size_t>(rank)];
    const device::DeviceGuard guard(one.device->api(), 0);
    const std::size_t bytes = values.size() * sizeof(Element);
    std::byte* const source = gpu_.allocate(std::max<std::size_t>(bytes, 1));
    if (bytes > 0) std::memcpy(source, values.data(), bytes);
    one.device->api().copy(tensor.memory, source, bytes, device::Direction::kOnDevice,
                           one.app->get());
  }

  /// The contents of the tensor on the program's stream after the event.
  template <class Element>
  std::vector<Element> read(int rank, const TensorView& view, const EventPtr& ready) {
    Rank& one = ranks_[static_cast<std::size_t>(rank)];
    const device::DeviceGuard guard(one.device->api(), 0);
    std::byte* const copy = gpu_.allocate(std::max<std::size_t>(view.bytes(), 1));
    one.device->wait(one.app->get(), ready);
    one.device->api().copy(copy, view.data, view.bytes(), device::Direction::kOnDevice,
                           one.app->get());
    EXPECT_TRUE(run_until([&] { return gpu_.run_all(); }))
        << "other ranks may have to launch theirs";
    std::vector<Element> values(static_cast<std::size_t>(view.count));
    if (!values.empty()) std::memcpy(values.data(), copy, view.bytes());
    return values;
  }

  template <class Done>
  bool run_until(const Done& done, Duration timeout = std::chrono::seconds(20)) {
    return job_->run_until(clock_, timeout, [&] {
      if (done()) return true;
      if (nccl_launches_on_thread()) std::this_thread::sleep_for(std::chrono::microseconds(20));
      return false;
    });
  }
  bool run(const std::vector<Operation>& operations) {
    return run_until([&] {
      return std::all_of(operations.begin(), operations.end(),
                         [](const Operation& o) { return o.done(); });
    });
  }

  void expect_no_faults() const {
    for (const std::string& fault : gpu_.faults()) ADD_FAILURE() << fault;
  }

 private:
  VirtualClock clock_;
  FakeGpu gpu_;
  FakeNccl nccl_;
  std::vector<Rank> ranks_;
  std::unique_ptr<LocalJob> job_;
};

/// An operation of a rank, its tensors, and how it ended.
template <class Element>
struct DeviceOperation {
  Submission submission;
  std::shared_ptr<EventPtr> ready = std::make_shared<EventPtr>();
  std::shared_ptr<TensorView> output = std::make_shared<TensorView>();

  /// An operation whose output is its input tensor.
  static DeviceOperation in_place(DeviceJob& job, int rank, const std::string& name, OpKind kind,
                                  DataType type, const std::vector<Element>& values) {
    DeviceOperation operation;
    auto [tensor, event] = job.make<Element>(rank, values);
    operation.submission.name = name;
    operation.submission.parameters = parameters_of(kind);
    operation.submission.input = operation.submission.output = tensor.view(type);
    operation.submission.input_ready = event;
    *operation.output = operation.submission.output;
    operation.watch();
    return operation;
  }
  /// The program's queue allocates the output when its size is known.
  static DeviceOperation gathering(DeviceJob& job, int rank, const std::string& name, OpKind kind,
                                   DataType type, const std::vector<Element>& values) {
    DeviceOperation operation = in_place(job, rank, name, kind, type, values);
    operation.submission.allocate_output = [&job, rank, type,
                                            made = operation.output](const OutputSizes& sizes) {
      const std::int64_t rows =
          std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
      auto [tensor, event] =
          job.make<Element>(rank, std::vector<Element>(static_cast<std::size_t>(rows)));
      if (sizes.writable != nullptr) *sizes.writable = event;
      return *made = tensor.view(type);
    };
    return operation;
  }
  void watch() {
    submission.on_done = [ready = ready](const Status& status, const EventPtr& output_ready) {
      EXPECT_TRUE(status.ok()) << status.message;
      *ready = output_ready;
    };
  }
};

/// A job whose tensors go through NCCL, or are staged through the host, with 1 to 4 ranks.
class DevicePathsTest : public ::testing::TestWithParam<std::tuple<Path, int>> {
 protected:
  DevicePathsTest()
      : size_(std::get<1>(GetParam())),
        job_(size_, path(), {}, {}, static_cast<std::uint64_t>(size_)) {}
  static Path path() { return std::get<0>(GetParam()); }

  /// Submits the operations of each rank together and waits for them.
  template <class Element>
  void run(const std::vector<std::vector<DeviceOperation<Element>>>& ranks) {
    std::vector<Operation> handles;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      std::vector<Submission> submissions;
      for (const auto& one : ranks[rank]) submissions.push_back(one.submission);
      for (auto& handle :
           job_.runtime(static_cast<int>(rank)).submit(submissions, Progress::kBackground))
        handles.push_back(handle);
    }
    ASSERT_TRUE(job_.run(handles));
    for (const Operation& handle : handles)
      EXPECT_TRUE(handle.status().ok()) << handle.status().message;
  }
  template <class Element>
  std::vector<Element> result(int rank, const DeviceOperation<Element>& one) {
    return job_.read<Element>(rank, *one.output, *one.ready);
  }

  const int size_;
  DeviceJob job_;
};

inline auto paths_and_ranks() {
  return ::testing::Combine(::testing::Values(Path::kNccl, Path::kStaged),
                            ::testing::Values(1, 2, 3, 4));
}
inline std::string name_of_path(const ::testing::TestParamInfo<std::tuple<Path, int>>& test) {
  return (std::get<0>(test.param) == Path::kNccl ? "Nccl" : "Staged") +
         std::to_string(std::get<1>(test.param));
}

}  // namespace hvd::testing
