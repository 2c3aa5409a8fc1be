#include "hvd/status.h"

#include "hvd/error.h"

namespace hvd {

void Status::raise_if_error() const {
  switch (code) {
    case StatusCode::kOk:
      return;
    case StatusCode::kUsage:
      throw UsageError(message);
    case StatusCode::kMismatch:
      throw MismatchError(message);
    case StatusCode::kStalled:
      throw StalledError(message, rank);
    case StatusCode::kPeerLost:
      throw PeerLostError(message, rank);
    case StatusCode::kShutdown:
      throw ShutdownError(message);
    case StatusCode::kInternal:
      break;
  }
  throw Error(message);
}

}  // namespace hvd
