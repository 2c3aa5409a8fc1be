#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "device/context.h"

namespace hvd::device {

/// Why this process cannot use the device any more: it was given up, an earlier error has broken
/// its context, or its calls do not return within the limit, after which it is given up. Empty if
/// the device works. The calls are made on a thread of their own, which may be left behind.
std::string find_trouble(const std::shared_ptr<Context>&, Duration limit);

}  // namespace hvd::device
