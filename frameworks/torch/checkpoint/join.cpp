#include "hvd/torch/join.h"

#include <string>

#include "checkpoint/rank_talk.h"
#include "data/rank_comparison.h"

namespace hvd {

int join(const TrainingState& state) {
  const int last = join();
  libtorch::require_agreement(
      "join.state", {.error = {}, .description = libtorch::description_of(state)}, ProcessSet());
  for (const TrainingState::Entry& entry : state.entries()) {
    entry.item->broadcast_shared(last, "join." + entry.name);
  }
  return last;
}

}  // namespace hvd
