#pragma once

#include <memory>

#include "backend/nccl/library.h"
#include "device/context.h"

namespace hvd::nccl {

/// The library with communicators that block, whose calls a thread of their own makes. To whoever
/// uses it they are like those that do not: a call returns at once, and health() says when it is
/// over.
///
/// Note [The launcher thread]: NCCL starts a thread, and joins it, for each launch of a
/// communicator that does not block; one that blocks launches in the thread that calls. So there is
/// one thread for all communicators of a device, which makes the calls in the order in which they
/// were asked for, the order of the plan. What is made once a communicator has settled and returns
/// at once (registering buffers) and what ends one (abort(), destroy(), see CommTeardown) is called
/// where it is asked for. abort() is how a call that hangs is ended: NCCL lets another thread do
/// so. A communicator that is still being made cannot be named yet; then the thread aborts it when
/// NCCL returns, and is left behind if that is never.
///
/// The thread starts with the first communicator. It lives as long as the library, and is waited
/// for for a second at most. In the steady state nothing is allocated for a call.
///
/// @param library whose begin_init() can make communicators that block
std::shared_ptr<Library> make_launcher(std::shared_ptr<Library> library,
                                       std::shared_ptr<device::Context> device);

}  // namespace hvd::nccl
