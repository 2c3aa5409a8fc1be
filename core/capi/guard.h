#pragma once

#include <string>
#include <utility>

#include "hvd/c/hvd.h"
#include "hvd/error.h"
#include "hvd/process_set.h"

struct hvd_process_set {
  hvd::ProcessSet set;
};

namespace hvd::capi {

/// Returns the status of the exception in flight and stores its text as this thread's
/// hvd_last_error(). @pre inside a catch
hvd_status_t record_current_exception() noexcept;

/// Runs the body of a C function, and converts exceptions to a status.
template <class Body>
hvd_status_t guarded(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return HVD_OK;
  } catch (...) {
    return record_current_exception();
  }
}

/// @throws UsageError when an argument is NULL; `what` reads as "hvd_rank: rank".
template <class T>
T& required(T* argument, const char* what) {
  if (argument == nullptr) throw UsageError(std::string(what) + " is NULL");
  return *argument;
}

inline ProcessSet set_of(const hvd_process_set_t* handle) {
  return handle == nullptr ? ProcessSet() : handle->set;
}

}  // namespace hvd::capi
