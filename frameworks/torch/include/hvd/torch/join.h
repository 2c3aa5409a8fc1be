#pragma once

#include "hvd/hvd.h"
#include "hvd/torch/training_state.h"

namespace hvd {

/// @addtogroup exchange
/// @{

/// Joins like hvd::join(), for a rank without further data. Then sends `state` to all ranks from
/// the rank that joined last, which has taken part in all updates. Each rank keeps its own random
/// streams (except those of RandomStreams::shared()), values per rank and metrics.
///
///     for (auto& batch : *loader) { ... }  // more batches on some ranks than on others
///     hvd::join(state);
///
/// Every rank of the job makes the call, with a state that has the same items in the same order.
/// Collective; blocks. The objects that the state refers to must not be changed by other threads.
/// @return the last rank to join
/// @throws MismatchError on every rank when the states' items differ (no item has changed then), or
/// when models or optimizers differ. UsageError on a rank that cannot load an item that it receives
/// (a data loader of another data set), and MismatchError on the other ranks. Also as hvd::join()
int join(const TrainingState& state);

/// @}

}  // namespace hvd
