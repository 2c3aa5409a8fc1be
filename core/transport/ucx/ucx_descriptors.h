#pragma once

namespace hvd::ucx {

/// Makes the parts of UCX that are loaded open descriptors that close on exec. Call it again when
/// UCX has loaded further parts. Note [UCX's descriptors]. Thread-safe.
void close_descriptors_on_exec() noexcept;

}  // namespace hvd::ucx
