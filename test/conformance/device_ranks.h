#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/thread_ranks.h"

/// Runs the conformance suite on a backend for device memory, whose results are complete after an
/// event.
namespace hvd::conformance {

/// A rank with its own channel. It polls, because a device rings no doorbell.
class DeviceHarness final : public Harness {
 public:
  DeviceHarness(int rank, Doorbells& doorbells, std::unique_ptr<Backend> backend,
                std::pmr::memory_resource& memory)
      : memory_(memory), peers_(peers_of(rank, doorbells)), backend_(std::move(backend)) {
    channel_ = backend_->open(
        {.ranks = all_ranks(peers_.size()), .set_rank = rank, .device = {DeviceType::kCuda, 0}},
        peers_);
    while (!channel_->ready()) std::this_thread::yield();
  }
  int rank() const override { return peers_.rank(); }
  int size() const override { return peers_.size(); }
  Channel& channel() override { return *channel_; }
  std::pmr::memory_resource& memory() override { return memory_; }
  void run(Work& work) override {
    while (!work.progress()) std::this_thread::yield();
    const EventPtr ready = work.output_ready();
    while (ready && !ready->query()) std::this_thread::yield();
  }

 private:
  std::pmr::memory_resource& memory_;
  testing::FakePeers peers_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Channel> channel_;
};

/// The cases that the backend supports and that have one correct result. NCCL rounds between the
/// additions, so the only factor is the divisor of an average, which is a power of two for 16-bit
/// types. Elements are aligned to their size, as those of tensors are.
inline std::vector<Case> exact_cases(const Backend& backend, OpKind kind, int size) {
  std::vector<Case> cases;
  for (const Case& one : cases_of(kind, size)) {
    Collective collective;
    collective.kind = one.kind;
    collective.op = one.op;
    collective.dtype = one.dtype;
    collective.scale = one.scale;
    const bool narrow = one.dtype == DataType::kFloat16 || one.dtype == DataType::kBFloat16;
    const bool rounded =
        narrow && !std::has_single_bit(static_cast<std::uint64_t>(one.scale.divisor));
    const bool average = one.scale.prescale == 1.0 && one.scale.postscale == 1.0 && !rounded;
    const int score = backend.score({}, {.device = {DeviceType::kCuda, 0}}, collective);
    if (score > 0 && average && !one.unaligned) cases.push_back(one);
  }
  return cases;
}

}  // namespace hvd::conformance
