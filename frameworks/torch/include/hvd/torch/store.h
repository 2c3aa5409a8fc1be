#pragma once

#include <c10/util/intrusive_ptr.h>

#include "hvd/hvd.h"

namespace c10d {
class Store;
}

namespace hvd {

/// @addtogroup start
/// @{

/// Like init(), for a job without MPI whose ranks find each other through a store of the program: a
/// c10d::TCPStore, FileStore or PrefixStore. Keys begin with "hvd/". The store is used only until
/// the call returns, and may have other users.
///
///     auto store = c10::make_intrusive<c10d::FileStore>("/shared/store", world_size);
///     hvd::init(store, rank, world_size);
///
/// Collective. Include the store's header, such as <torch/csrc/distributed/c10d/FileStore.hpp>.
/// @throws UsageError for a null store, for a rank that is not below world_size, and as init();
/// Error when the store fails; PeerLostError when a rank does not arrive
void init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
          const Options& = {});

/// @}

}  // namespace hvd
