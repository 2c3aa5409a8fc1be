#pragma once

#include <memory>

#include "bootstrap/rendezvous.h"
#include "hvd/store.h"

namespace hvd::rendezvous {

/// Meets in a store that all ranks reach, which may hold what earlier jobs have left.
std::unique_ptr<Rendezvous> meet_in_store(KeyValueStore, const Introduction&, Deadline);

}  // namespace hvd::rendezvous
