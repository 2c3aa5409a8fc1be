#include "hvd/torch/autocast.h"

#include <ATen/autocast_mode.h>

#include <string>

#include "hvd/error.h"

namespace hvd {
namespace {

c10::DeviceType checked(c10::Device device, c10::ScalarType type) {
  if (!device.is_cpu() && !device.is_cuda())
    throw UsageError("Autocast: expected the CPU or a CUDA device, got " + device.str());
  if (type != c10::ScalarType::BFloat16 && type != c10::ScalarType::Half) {
    throw UsageError(std::string("Autocast: expected bfloat16 or float16, got ") +
                     c10::toString(type));
  }
  return device.type();
}

}  // namespace

Autocast::Autocast(c10::Device device, c10::ScalarType type, bool enabled)
    : device_(checked(device, type)),
      type_before_(at::autocast::get_autocast_dtype(device_)),
      enabled_before_(at::autocast::is_autocast_enabled(device_)) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(device_, type);
  at::autocast::set_autocast_enabled(device_, enabled);
}

Autocast::~Autocast() {
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, type_before_);
  // The cache holds casts of weights, which the optimizer changes next.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace hvd
