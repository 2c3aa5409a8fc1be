#pragma once

#include <memory>
#include <string>

#include "device/api.h"

namespace hvd::device {

/// The implementation of Api with CUDA. Without a driver it has no devices.
std::shared_ptr<Api> make_cuda_api();

/// The versions and devices, as "runtime 13.0, driver 13.0, 8 devices (NVIDIA H200, ...)", or the
/// reason why CUDA cannot be used. For messages.
std::string describe_cuda();

}  // namespace hvd::device
