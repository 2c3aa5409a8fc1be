#include "capi/guard.h"

#include <exception>
#include <new>

#include "base/expect.h"
#include "hvd/elastic.h"

namespace hvd::capi {
namespace {

struct LastError {
  std::string text = {};
  // Set if there was no memory to store the text.
  const char* constant = nullptr;
  int rank = -1;
};

LastError& last_error() noexcept {
  thread_local LastError error;
  return error;
}

hvd_status_t record(hvd_status_t status, const char* text, int rank = -1) noexcept {
  LastError& error = last_error();
  error.rank = rank;
  error.constant = nullptr;
  try {
    error.text = text;
  } catch (...) {
    error.constant = "out of memory while an error was reported";
  }
  return status;
}

}  // namespace

hvd_status_t record_current_exception() noexcept {
  HVD_EXPECT(std::current_exception() != nullptr, "a handler calls it");
  try {
    throw;
  } catch (const NotInitializedError& error) {
    return record(HVD_ERROR_NOT_INITIALIZED, error.what());
  } catch (const UsageError& error) {
    return record(HVD_ERROR_USAGE, error.what());
  } catch (const MismatchError& error) {
    return record(HVD_ERROR_MISMATCH, error.what());
  } catch (const StalledError& error) {
    return record(HVD_ERROR_STALLED, error.what(), error.rank());
  } catch (const PeerLostError& error) {
    return record(HVD_ERROR_PEER_LOST, error.what(), error.rank());
  } catch (const ShutdownError& error) {
    return record(HVD_ERROR_SHUTDOWN, error.what());
  } catch (const elastic::GenerationOver& error) {
    return record(HVD_ERROR_GENERATION_OVER, error.what());
  } catch (const std::bad_alloc&) {
    return record(HVD_ERROR_INTERNAL, "out of memory");
  } catch (const std::exception& error) {
    return record(HVD_ERROR_INTERNAL, error.what());
  } catch (...) {
    return record(HVD_ERROR_INTERNAL, "an exception of an unknown type");
  }
}

}  // namespace hvd::capi

using hvd::capi::last_error;

const char* hvd_last_error(void) {
  return last_error().constant != nullptr ? last_error().constant : last_error().text.c_str();
}

int hvd_last_error_rank(void) { return last_error().rank; }

const char* hvd_status_name(hvd_status_t status) {
  switch (status) {
    case HVD_OK:
      return "ok";
    case HVD_ERROR_USAGE:
      return "usage";
    case HVD_ERROR_MISMATCH:
      return "mismatch";
    case HVD_ERROR_STALLED:
      return "stalled";
    case HVD_ERROR_PEER_LOST:
      return "peer lost";
    case HVD_ERROR_SHUTDOWN:
      return "shutdown";
    case HVD_ERROR_INTERNAL:
      return "internal";
    case HVD_ERROR_NOT_INITIALIZED:
      return "not initialised";
    case HVD_ERROR_GENERATION_OVER:
      return "generation over";
  }
  return "unknown";
}
