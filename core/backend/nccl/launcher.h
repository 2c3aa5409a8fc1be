#pragma once

#include <memory>

#include "backend/nccl/library.h"
#include "device/context.h"

namespace hvd::nccl {

/// Wraps a library so that one thread makes its calls, on blocking communicators. To the caller
/// they look non-blocking: a call returns at once, and health() reports when it is complete.
///
/// Note [The launcher thread]: NCCL starts and joins a thread for each launch on a non-blocking
/// communicator. On a blocking communicator it launches in the calling thread. Therefore one thread
/// makes the calls for all communicators of a device, in the order in which the engine requests
/// them, which is the order of the plan. Registering a buffer returns at once and happens only
/// while no call is under way, so the calling thread does it. abort() and destroy() run on the
/// threads of CommTeardown. A communicator that NCCL is still creating has no handle yet. If hvd
/// aborts it, the launcher thread passes the abort to NCCL when the creation returns. If NCCL never
/// returns, the thread is left behind.
///
/// Note [Aborting during a call]: an abort must end a call that hangs, but it also frees the
/// communicator, which that call may still read. So abort() first waits briefly for the running
/// call, then revokes its communicator if this version of NCCL can (2.28.9 and newer). The revoked
/// call returns without freeing memory, and the abort follows. Older versions have only the abort,
/// which stops the call and frees the communicator in one step.
///
/// The thread starts with the first communicator and ends with the library, which waits at most one
/// second for it. Calls of repeated steps allocate no memory.
///
/// @param library one whose begin_init() can create blocking communicators
std::shared_ptr<Library> make_launcher(std::shared_ptr<Library> library,
                                       std::shared_ptr<device::Context> device);

}  // namespace hvd::nccl
