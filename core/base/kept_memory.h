#pragma once

#include <memory>

namespace hvd {

/// Keeps memory that a transport may still touch until the process ends. Thread-safe.
///
/// Note [Who frees the buffer]
/// When a collective is cut off by a failure, the transport may still read its input and write its
/// output. MPI has no call that ends a message at once: a cancelled receive completes only with the
/// help of MPI's progress, a send cannot be cancelled, and waiting for either may wait for a dead
/// peer; NCCL's kernels are no different. So the owners of such memory - tensors, fusion buffers,
/// receive buffers - move here and stay until the process ends, which after a lost peer is soon.
/// The request objects stay the transport's.
void keep_until_exit(std::shared_ptr<const void> owner);

}  // namespace hvd
