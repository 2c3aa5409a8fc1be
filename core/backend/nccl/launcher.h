#pragma once

#include <memory>

#include "backend/nccl/library.h"
#include "device/context.h"

namespace hvd::nccl {

/// Wraps a library so that one thread makes its calls, on communicators that block. To the caller
/// the communicators behave like those that do not block: a call returns at once, and health()
/// reports when it is complete.
///
/// Note [The launcher thread]: NCCL starts and joins a thread for each launch on a communicator
/// that does not block. On a communicator that blocks it launches in the calling thread. Therefore
/// one thread makes the calls for all communicators of a device, in the order in which the engine
/// requests them, which is the order of the plan. Registering a buffer returns at once and happens
/// only while no call is under way, so the calling thread does it. abort() and destroy() run on the
/// threads of CommTeardown. A communicator that NCCL is still creating has no handle yet; if it is
/// aborted, the launcher thread aborts it when NCCL returns. If NCCL never returns, the thread is
/// left behind.
///
/// Note [Aborting during a call]: an abort must end a call that hangs, but it also frees the
/// communicator, which that call may still read. So abort() first waits a little for the running
/// call, then revokes its communicator where NCCL can (2.28.9 and newer). The revoked call returns
/// and frees no memory, and the abort follows it. Older versions have only the abort, which stops
/// the call and frees the communicator in one step.
///
/// The thread starts with the first communicator and ends with the library, which waits at most one
/// second for it. Repeated steps allocate nothing for a call.
///
/// @param library whose begin_init() can create communicators that block
std::shared_ptr<Library> make_launcher(std::shared_ptr<Library> library,
                                       std::shared_ptr<device::Context> device);

}  // namespace hvd::nccl
