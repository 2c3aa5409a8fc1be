#pragma once

#include "hvd/c/hvd.h"
#include "hvd/process_set.h"

struct hvd_process_set {
  hvd::ProcessSet set;
};

namespace hvd::capi {

inline ProcessSet set_of(const hvd_process_set_t* handle) {
  return handle == nullptr ? ProcessSet() : handle->set;
}

}  // namespace hvd::capi
