#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bootstrap/store.h"
#include "hvd/store.h"

namespace hvd::rendezvous {

/// A store of the program, or of torchrun's agent. Each call of its functions runs on a thread of
/// its own, because they may block for longer than any deadline. If one does not return in time,
/// that thread and the store live on until it does, and every later call fails at once. The
/// exceptions of the functions become hvd::Error.
/// @param open returns the functions; runs on the thread, too
/// @param name for error texts until `open` has returned
/// @param deadline of `open`, and for as long as a wait lasts, of each call that the wait makes
/// @throws hvd::Error when `open` throws or does not return in time
std::unique_ptr<Store> open_program_store(std::function<KeyValueStore()> open,
                                          const std::string& name, Deadline deadline);

}  // namespace hvd::rendezvous
