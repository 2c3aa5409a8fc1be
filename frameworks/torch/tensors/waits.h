#pragma once

#include <chrono>

#include "hvd/status.h"
#include "hvd/torch/handle.h"

namespace hvd::libtorch {

/// Waits for an operation until the deadline, in slices between which the function of
/// set_wait_check() runs. @return whether the operation is done @throws the exceptions of that
/// function
bool wait_in_slices(const Handle& handle, std::chrono::steady_clock::time_point deadline);

/// Waits until the device has reached the event, as wait_in_slices().
bool wait_in_slices(const EventPtr& event, std::chrono::steady_clock::time_point deadline);

}  // namespace hvd::libtorch
