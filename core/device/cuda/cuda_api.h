#pragma once

#include <memory>
#include <string>

#include "device/api.h"

namespace hvd::device {

/// CUDA, behind the seam. Does not need a driver to be there: then there are no devices. This
/// header needs none of CUDA's.
std::shared_ptr<Api> make_cuda_api();

/// "runtime 13.0, driver 13.0, 8 devices (NVIDIA H200, ...)", or why there is none to use. For
/// people.
std::string describe_cuda();

}  // namespace hvd::device
