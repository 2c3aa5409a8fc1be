#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "backend/nccl/nccl_backend.h"
#include "backend/nccl/nccl_channel.h"
#include "hvd/error.h"
#include "support/fake_nccl.h"
#include "support/fakes.h"
#include "support/local_backend.h"
#include "support/nccl_launch.h"

/// Fixture of the channel's tests: ranks on a simulated GPU and a simulated NCCL, stepped by one
/// thread.
namespace hvd::testing {

using std::chrono::seconds;

class SetClock final : public Clock {
 public:
  TimePoint now() const noexcept override { return now_; }
  TimePoint now_{std::chrono::hours(1)};
};

/// The ranks of a job, stepped by one thread.
class NcclChannelTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front(); }

  struct Rank {
    explicit Rank(int rank, int size) : peers(rank, size) {}
    FakePeers peers;
    std::shared_ptr<device::Context> device;
    std::unique_ptr<NcclBackend> backend;
    std::unique_ptr<Channel> channel;
  };

  /// Ends the call of NCCL in which a test has left a thread behind, and waits for that thread,
  /// which uses the simulated GPU until the call returns.
  void end_left_threads() {
    ranks_.clear();
    nccl_.reset();
    for (const auto& library : libraries_) {
      const auto limit = std::chrono::steady_clock::now() + seconds(20);
      while (!library.expired() && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_TRUE(library.expired());
    }
  }

  /// The library of a rank, wrapped in a launcher if this run uses one.
  std::shared_ptr<nccl::Library> library(int rank, const std::shared_ptr<device::Context>& device) {
    const std::shared_ptr<nccl::Library> own = nccl_->library(rank);
    libraries_.push_back(own);
    return with_launch_of_test(own, device);
  }

  void start(int size, const FakeNcclOptions& fake = {}, const nccl::NcclOptions& options = {},
             const std::optional<nccl::NcclOptions>& of_the_last = {}) {
    nccl_ = std::make_unique<FakeNccl>(gpu_, fake);
    const auto world = std::make_shared<LocalWorld>(size);
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(rank, size));
      Rank& one = *ranks_.back();
      one.device = std::make_shared<device::Context>(
          gpu_.api(rank), 0, device::ContextDeps{.run_on_helper = run_on_helper_});
      const auto host = std::make_shared<LocalBackend>(world);
      one.backend = std::make_unique<NcclBackend>(
          library(rank, one.device), one.device,
          [host](const ChannelSpec& spec, Peers& peers) { return host->open(spec, peers); },
          rank == size - 1 ? of_the_last.value_or(options) : options, clock_);
      one.channel = one.backend->open(
          {.ranks = all, .set_rank = rank, .device = {DeviceType::kCuda, 0}}, one.peers);
    }
  }

  /// The last of a rank's communicators is freed when its backend is destroyed.
  void end_ranks() {
    for (const auto& rank : ranks_) rank->channel.reset();
    for (const auto& rank : ranks_) rank->backend.reset();
  }

  bool connect(std::size_t ranks) {
    return soon([&] {
      bool all = true;
      for (std::size_t rank = 0; rank < ranks; ++rank) all = ranks_[rank]->channel->ready() && all;
      return all;
    });
  }
  /// Calls `done` until it returns true: at most 50 times, or for 20 s in a run with a launcher.
  template <class Done>
  static bool soon(const Done& done) {
    const bool waits = nccl_launches_on_thread();
    const auto limit = std::chrono::steady_clock::now() + seconds(20);
    for (int round = 0; waits ? std::chrono::steady_clock::now() < limit : round < 50; ++round) {
      if (done()) return true;
      if (waits) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return false;
  }

  std::span<std::byte> tensor(const std::vector<float>& values) {
    std::byte* const memory = gpu_.allocate(values.size() * sizeof(float));
    std::memcpy(memory, values.data(), values.size() * sizeof(float));
    return {memory, values.size() * sizeof(float)};
  }
  static std::vector<float> values_of(std::span<const std::byte> memory) {
    std::vector<float> values(memory.size() / sizeof(float));
    std::memcpy(values.data(), memory.data(), memory.size());
    return values;
  }

  /// Completes the works, and then all operations of the device.
  void complete(const std::vector<std::unique_ptr<Work>>& works) {
    for (const auto& work : works) {
      while (!work->progress()) {
      }
    }
    EXPECT_TRUE(gpu_.run_all());
  }
  /// Opens a second communicator on both ranks.
  std::vector<std::unique_ptr<Channel>> open_second() {
    std::vector<std::unique_ptr<Channel>> second;
    for (int rank = 0; rank < 2; ++rank) {
      Rank& one = *ranks_[static_cast<std::size_t>(rank)];
      second.push_back(one.backend->open(
          {.process_set = 1, .ranks = {0, 1}, .set_rank = rank, .device = {DeviceType::kCuda, 0}},
          one.peers));
    }
    EXPECT_TRUE(soon([&] {
      const bool one = second[0]->ready();
      return second[1]->ready() && one;
    }));
    return second;
  }

  std::vector<float> allreduce(const Collective& collective,
                               std::vector<std::vector<float>> inputs) {
    std::vector<std::span<std::byte>> tensors;
    for (const auto& input : inputs) tensors.push_back(tensor(input));
    std::vector<std::unique_ptr<Work>> works;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      works.push_back(ranks_[rank]->channel->launch(collective, tensors[rank], tensors[rank]));
    for (const auto& work : works) {
      EXPECT_TRUE(soon([&] { return work->progress(); }));
      EXPECT_NE(work->output_ready(), nullptr);
    }
    EXPECT_TRUE(gpu_.run_all());
    for (const auto& other : tensors) EXPECT_EQ(values_of(other), values_of(tensors[0]));
    return values_of(tensors[0]);
  }

  static Collective sum(std::int64_t count) { return {.count = count}; }

  FakeGpu gpu_;
  device::RunOnHelper run_on_helper_;  // of the ranks that start() makes
  SetClock clock_;
  std::unique_ptr<FakeNccl> nccl_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::weak_ptr<nccl::Library>> libraries_;
};

}  // namespace hvd::testing
