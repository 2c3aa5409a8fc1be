#pragma once

#include <string>

#include "hvd/error.h"

namespace hvd {

/// The transport has lost its connection to a rank, mostly because the rank's process or host has
/// ended. Other ranks may know the cause. The engine converts it to a PeerLostError.
class BrokenConnection : public Error {
 public:
  BrokenConnection(const std::string& message, int rank) : Error(message), rank_(rank) {}
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

}  // namespace hvd
