// Tests the backend with the real NCCL and one rank: it must accept every collective and give the
// right result.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>

#include "backend/nccl/library.h"
#include "backend/nccl/nccl_backend.h"
#include "backend/self/self_backend.h"
#include "conformance/device_ranks.h"
#include "device/cuda/cuda_api.h"

namespace hvd::conformance {
namespace {

/// Pinned memory, which the suite can access on the host and NCCL on the device. Managed memory
/// does not exist on every system.
class PinnedMemory final : public std::pmr::memory_resource {
 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, bytes > 0 ? bytes : 1, cudaHostAllocDefault) != cudaSuccess)
      throw std::bad_alloc();
    return memory;
  }
  void do_deallocate(void* memory, std::size_t, std::size_t) override { cudaFreeHost(memory); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

class GpuNcclConformance : public ::testing::TestWithParam<OpKind> {};

TEST_P(GpuNcclConformance, OneRank) {
  const auto api = device::make_cuda_api();
  if (api->device_count() == 0) GTEST_SKIP() << "no GPU: " << device::describe_cuda();
  std::string reason;
  const auto library = nccl::load_library(reason);
  ASSERT_NE(library, nullptr) << reason;
  const device::DeviceGuard guard(*api, 0);
  const auto local = std::make_shared<SelfBackend>();
  auto backend = std::make_unique<NcclBackend>(
      library, std::make_shared<device::Context>(api, 0),
      [local](const ChannelSpec& spec, Peers& peers) { return local->open(spec, peers); });
  const auto cases = exact_cases(*backend, GetParam(), 1);
  Doorbells doorbells(1);
  PinnedMemory memory;
  DeviceHarness harness(0, doorbells, std::move(backend), memory);
  run_cases(harness, cases);
}

INSTANTIATE_TEST_SUITE_P(Nccl, GpuNcclConformance, ::testing::ValuesIn(kKinds),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace hvd::conformance
