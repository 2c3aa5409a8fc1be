#pragma once

#include <memory>
#include <utility>

#include "backend/backend.h"
#include "device/context.h"
#include "engine/batch.h"
#include "engine/staging.h"

namespace hvd::runtime {

/// Whether make_device_self() can run the batch: its set has one rank, and the device can apply the
/// factors (it scales floating types only).
bool runs_on_device_self(const Batch&) noexcept;

/// The channel and the staging of a process set of one rank whose tensors are on a GPU. The result
/// of a collective is the input times the factors of a reduction, so there is no communicator,
/// packing, cast or copy through the host. A tensor that is reduced in place without factors is not
/// touched. Every other tensor is copied or scaled on the device by one launch.
/// @param host takes host memory for this set; see Channel::host()
std::pair<std::unique_ptr<Channel>, std::unique_ptr<Staging>> make_device_self(
    std::shared_ptr<device::Context>, std::unique_ptr<Channel> host);

}  // namespace hvd::runtime
