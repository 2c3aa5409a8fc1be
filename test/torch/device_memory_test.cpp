// hvd's memory from LibTorch's allocator, in a program that has not used a GPU through LibTorch.
#include "tensors/allocators.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include "hvd/error.h"

namespace hvd::testing {
namespace {

int initialisations = 0;

/// LibTorch's allocator before its initialisation.
class LateAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t) override {
    TORCH_CHECK(initialized(), "the allocator is not initialised");
    return {};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return initialisations > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

/// Counts the initialisations. LibTorch looks the hooks up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { ++initialisations; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// There is no GPU here, so the allocation fails at the stream that follows the initialisation.
TEST(DeviceMemoryTest, InitialisesTheAllocatorOnce) {
  LateAllocator allocator;
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator);
  EXPECT_FALSE(allocator.initialized());
  for (int i = 0; i < 2; ++i) EXPECT_THROW(libtorch::device_memory().allocate(0, 100), Error);
  EXPECT_EQ(initialisations, 1);
  c10::SetAllocator(c10::DeviceType::CUDA, nullptr);
}

TEST(DeviceMemoryTest, IsEmptyWithoutAnAllocator) {
  EXPECT_EQ(libtorch::device_memory().allocate(0, 100).memory, nullptr);
}

}  // namespace
}  // namespace hvd::testing
