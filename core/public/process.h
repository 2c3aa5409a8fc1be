#pragma once

#include <memory>

#include "engine/runtime.h"

namespace hvd::runtime {

/// The process's runtime: the one global of the library, behind hvd::init() and its kin.
/// @throws NotInitializedError before init() and after shutdown(). Thread-safe.
std::shared_ptr<Runtime> current_runtime();

}  // namespace hvd::runtime
