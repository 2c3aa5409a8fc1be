#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "device/context.h"

namespace hvd::device {

/// The reason why this process cannot use the device any more: the device was given up, an earlier
/// error has broken its context, or calls do not return within the limit. In the last case the
/// device is given up. Empty if the device works. The calls are made on a separate thread, which
/// may be left behind.
std::string find_failure(const std::shared_ptr<Context>&, Duration limit);

}  // namespace hvd::device
