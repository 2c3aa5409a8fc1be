#pragma once

#include <c10/core/Stream.h>

#include <string>
#include <vector>

/// The CUDA device that a test runs on: fake_cuda.cpp's, or a real one (test/gpu/real_cuda.cpp).
namespace hvd::testing {

int cuda_devices();

/// The faults on the simulated device since the last call; empty for a real one.
std::vector<std::string> take_cuda_faults();

/// Another stream of the device.
c10::Stream other_cuda_stream(c10::DeviceIndex device);

}  // namespace hvd::testing
