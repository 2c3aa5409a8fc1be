#pragma once

#include <c10/util/intrusive_ptr.h>

#include "hvd/hvd.h"

namespace c10d {
class Store;
}

namespace hvd {

/// init() of a job without MPI whose ranks meet in a store that the program has: a c10d::TCPStore,
/// FileStore or PrefixStore, as torch.distributed takes it. Keys begin with "hvd/". The store is
/// used until this returns and not after it; it may serve other things meanwhile.
///
///   auto store = c10::make_intrusive<c10d::FileStore>("/shared/store", world_size);
///   hvd::init(store, rank, world_size);
///
/// Collective. Programs include the store's header: <torch/csrc/distributed/c10d/FileStore.hpp>.
/// @throws UsageError without a store, for a rank that is not below world_size, and as init();
/// Error when the store fails; PeerLostError when a rank does not arrive
void init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
          const Options& = {});

}  // namespace hvd
