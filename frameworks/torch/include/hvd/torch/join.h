#pragma once

#include "hvd/hvd.h"
#include "hvd/torch/training_state.h"

namespace hvd {

/// This rank has no more data: hvd::join(), and then what a rank needs that has missed updates.
/// When it returns, everything that `state` names is on every rank what it is on the rank that
/// joined last, which has taken part in all of them. Each rank keeps what it has for itself: random
/// streams (but for those that RandomStreams::shared() gives), values of each rank and metrics.
///
///   for (auto& batch : *loader) { ... }  // more batches on some ranks than on others
///   hvd::join(state);
///
/// Every rank of the job calls it, with a state that names the same things in the same order.
/// Collective, blocks; not thread-safe with respect to what the state refers to.
/// @return the last rank to join
/// @throws MismatchError on every rank when states name different things, and nothing has changed,
/// or when models or optimizers differ; UsageError on a rank that cannot take what it gets (a data
/// loader of another data set), and MismatchError on the others; and as hvd::join()
int join(const TrainingState& state);

}  // namespace hvd
