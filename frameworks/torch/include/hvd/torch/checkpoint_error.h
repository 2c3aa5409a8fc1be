#pragma once

#include "hvd/error.h"

namespace hvd {

/// A checkpoint could not be written or read: the disk is full, the folder cannot be written to,
/// a file is damaged or missing, or it holds something else than it is loaded into. Raised on every
/// rank of the set; the runtime goes on. Checkpoints that were complete before still are, and what
/// was to be loaded has not changed.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace hvd
