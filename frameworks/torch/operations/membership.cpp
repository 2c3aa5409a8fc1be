#include "operations/membership.h"

#include "hvd/elastic.h"
#include "hvd/hvd.h"

namespace hvd::libtorch {

bool waits_for_rank() { return is_initialized() && !elastic::has_rank(); }

Membership membership_of(const ProcessSet& process_set) {
  if (process_set.id() == 0 && waits_for_rank()) return {.ranks = {0}, .position = 0};
  return {.ranks = process_set.ranks(), .position = process_set.rank()};
}

}  // namespace hvd::libtorch
