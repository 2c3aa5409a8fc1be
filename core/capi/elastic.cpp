#include "hvd/elastic.h"

#include <memory>
#include <span>
#include <string>

#include "capi/guard.h"
#include "hvd/c/hvd.h"
#include "hvd/error.h"

struct hvd_elastic_state {
  hvd::elastic::State state;
};

namespace hvd::capi {
namespace {

/// Throws the exception of a call of hvd that has failed in a function of the program, which has
/// returned its status.
void raise(hvd_status_t status) {
  const std::string cause = hvd_last_error();
  switch (status) {
    case HVD_OK:
      return;
    case HVD_ERROR_USAGE:
      throw UsageError(cause);
    case HVD_ERROR_MISMATCH:
      throw MismatchError(cause);
    case HVD_ERROR_STALLED:
      throw StalledError(cause, hvd_last_error_rank());
    case HVD_ERROR_PEER_LOST:
      throw PeerLostError(cause, hvd_last_error_rank());
    case HVD_ERROR_SHUTDOWN:
      throw ShutdownError(cause);
    case HVD_ERROR_NOT_INITIALIZED:
      throw NotInitializedError(cause);
    case HVD_ERROR_GENERATION_OVER:
      throw elastic::GenerationOver(cause);
    case HVD_ERROR_INTERNAL:
      break;
  }
  throw Error(cause);
}

}  // namespace
}  // namespace hvd::capi

using hvd::capi::guarded;
using hvd::capi::required;

hvd_status_t hvd_elastic_state_create(hvd_elastic_state_t** state) {
  return guarded([&] {
    required(state, "hvd_elastic_state_create: state") = nullptr;
    *state = new hvd_elastic_state;
  });
}

void hvd_elastic_state_free(hvd_elastic_state_t* state) { delete state; }

hvd_status_t hvd_elastic_track(hvd_elastic_state_t* state, const char* name, void* memory,
                               size_t bytes) {
  return guarded([&] {
    hvd::elastic::State& tracking = required(state, "hvd_elastic_track: state").state;
    required(name, "hvd_elastic_track: name");
    auto* const first = static_cast<unsigned char*>(memory);
    required(first, "hvd_elastic_track: memory");
    tracking.track(name, std::span(first, bytes));
  });
}

hvd_status_t hvd_elastic_on_change(hvd_elastic_state_t* state, hvd_elastic_on_change_t callback,
                                   void* user_data) {
  return guarded([&] {
    hvd::elastic::State& tracking = required(state, "hvd_elastic_on_change: state").state;
    required(callback, "hvd_elastic_on_change: callback");
    tracking.on_change([callback, user_data](const hvd::elastic::Change& change) {
      const hvd_elastic_change_t passed = {sizeof passed,       change.old_size, change.new_size,
                                           change.old_rank,     change.new_rank, change.generation,
                                           change.cause.c_str()};
      callback(&passed, user_data);
    });
  });
}

hvd_status_t hvd_elastic_commit(hvd_elastic_state_t* state) {
  return guarded([&] { required(state, "hvd_elastic_commit: state").state.commit(); });
}

hvd_status_t hvd_elastic_run(hvd_elastic_state_t* state, hvd_elastic_function_t function,
                             hvd_elastic_function_t load, void* user_data) {
  return guarded([&] {
    hvd::elastic::State& tracking = required(state, "hvd_elastic_run: state").state;
    required(function, "hvd_elastic_run: function");
    hvd::elastic::RunOptions options;
    if (load != nullptr) options.load = [&] { hvd::capi::raise(load(user_data)); };
    hvd::elastic::run(tracking, [&] { hvd::capi::raise(function(user_data)); }, options);
  });
}

int hvd_elastic_launched(void) { return hvd::elastic::launched() ? 1 : 0; }
int hvd_elastic_restart_count(void) { return hvd::elastic::restart_count(); }
uint64_t hvd_elastic_generation(void) { return hvd::elastic::generation(); }
