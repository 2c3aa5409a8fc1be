#pragma once

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <string>

#include "torch/support/fake_cuda.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {

/// Tests with tensors on the simulated GPU. What was not in order there fails the test.
class CudaTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const std::string& fault : take_fake_faults()) ADD_FAILURE() << fault;
  }

  static torch::Tensor gpu_tensor(at::IntArrayRef shape, torch::ScalarType type, int seed = 0) {
    return rank_tensor(rank(), shape, type, seed).to(device());
  }
  static c10::Stream side_stream() { return new_fake_stream(device().index()); }

  /// Equal, and on this rank's GPU.
  static ::testing::AssertionResult on_gpu(const torch::Tensor& actual, const torch::Tensor& expected) {
    if (!actual.defined() || actual.device() != device()) {
      return ::testing::AssertionFailure() << "expected a tensor on " << device() << ", got one on "
                                           << (actual.defined() ? actual.device().str() : "nothing");
    }
    return near(actual.cpu(), expected);
  }
};

}  // namespace hvd::testing
