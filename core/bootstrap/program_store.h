#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bootstrap/store.h"
#include "hvd/store.h"

namespace hvd::rendezvous {

/// A store of the program, or of torchrun's agent. Each call of its functions runs on a separate
/// thread, because they may block for longer than any deadline. If a call does not return in time,
/// its thread and the store live on until it returns, and every later call fails at once. The
/// exceptions of the functions become hvd::Error.
/// @param open returns the functions; also runs on a separate thread
/// @param name for error texts until `open` has returned
/// @param deadline of `open`; the calls that a wait makes may also take until then
/// @throws hvd::Error when `open` throws or does not return in time
std::unique_ptr<Store> open_program_store(std::function<KeyValueStore()> open,
                                          const std::string& name, Deadline deadline);

}  // namespace hvd::rendezvous
