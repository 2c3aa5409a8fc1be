#pragma once

#include <string>

#include "hvd/error.h"

namespace hvd {

/// The transport has lost a rank: mostly as its process or its host has ended, for a reason that
/// other ranks may know better. The engine makes a PeerLostError of it.
class BrokenConnection : public Error {
 public:
  BrokenConnection(const std::string& message, int rank) : Error(message), rank_(rank) {}
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

}  // namespace hvd
