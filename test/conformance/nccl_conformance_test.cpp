// Tests the NCCL backend's own part: the calls of a collective, with their types, buffers and
// groups. The device and NCCL are simulated; test/gpu runs the same cases on the real ones.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "backend/nccl/nccl_backend.h"
#include "conformance/device_ranks.h"
#include "support/fake_nccl.h"
#include "support/local_backend.h"

namespace hvd::conformance {
namespace {

/// The simulated device's memory. It comes from the heap, because the host may reuse memory that
/// was freed.
class FakeMemory final : public std::pmr::memory_resource {
 public:
  explicit FakeMemory(testing::FakeGpu& gpu) : gpu_(gpu) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override { return gpu_.allocate(bytes); }
  void do_deallocate(void* memory, std::size_t, std::size_t) override {
    gpu_.release(static_cast<std::byte*>(memory));
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
  testing::FakeGpu& gpu_;
};

class NcclConformance : public ::testing::TestWithParam<std::tuple<int, OpKind>> {};

TEST_P(NcclConformance, RanksAsThreads) {
  const auto [size, kind] = GetParam();
  testing::FakeGpu gpu({.seed = static_cast<std::uint64_t>(size)});
  testing::FakeNccl nccl(gpu);
  const auto world = std::make_shared<testing::LocalWorld>(size);
  Doorbells doorbells(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, kind = kind] {
      try {
        const auto local = std::make_shared<testing::LocalBackend>(world);
        auto backend = std::make_unique<NcclBackend>(
            nccl.library(rank), std::make_shared<device::Context>(gpu.api(rank), 0),
            [local](const ChannelSpec& spec, Peers& peers) { return local->open(spec, peers); });
        const auto cases = exact_cases(*backend, kind, static_cast<int>(doorbells.size()));
        EXPECT_GT(cases.size(), 40U);
        FakeMemory memory(gpu);
        DeviceHarness harness(rank, doorbells, std::move(backend), memory);
        run_cases(harness, cases);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  threads.clear();
  EXPECT_TRUE(gpu.faults().empty()) << gpu.faults().front();
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(nccl.counts(rank).destroyed, 1);
    EXPECT_EQ(nccl.counts(rank).aborted, 0);
    EXPECT_EQ(gpu.counts(rank).synchronize, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Fake, NcclConformance,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::ValuesIn(kKinds)),
                         [](const auto& test) {
                           return std::string(to_string(std::get<1>(test.param))) + "_" +
                                  std::to_string(std::get<0>(test.param));
                         });

}  // namespace
}  // namespace hvd::conformance
