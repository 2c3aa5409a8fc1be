#pragma once

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>

#include "torch/support/cuda_device.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {

/// Tests with tensors on a GPU, simulated or real. A fault on the device fails the test.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device().is_cuda()) GTEST_SKIP() << "there is no GPU that both hvd and LibTorch can use";
  }
  void TearDown() override {
    for (const std::string& fault : take_cuda_faults()) ADD_FAILURE() << fault;
  }

  static torch::Tensor gpu_tensor(at::IntArrayRef shape, torch::ScalarType type, int seed = 0) {
    return rank_tensor(rank(), shape, type, seed).to(device());
  }
  static c10::Stream side_stream() { return other_cuda_stream(device().index()); }

  static c10::Stream current_stream() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device());
  }
  /// Makes later work of `to` wait for the current work of `from`.
  static void order(const c10::Stream& from, const c10::Stream& to) {
    const c10::impl::VirtualGuardImpl gpus(c10::DeviceType::CUDA);
    void* event = nullptr;
    gpus.record(&event, from, device().index(), c10::EventFlag::BACKEND_DEFAULT);
    gpus.block(event, to);
    gpus.destroyEvent(event, device().index());
  }

  /// Checks that the tensors are equal and on this rank's GPU.
  static ::testing::AssertionResult on_gpu(const torch::Tensor& actual,
                                           const torch::Tensor& expected) {
    if (!actual.defined() || actual.device() != device()) {
      return ::testing::AssertionFailure()
             << "expected a tensor on " << device() << ", got one on "
             << (actual.defined() ? actual.device().str() : "nothing");
    }
    return near(actual.cpu(), expected);
  }
};

}  // namespace hvd::testing
