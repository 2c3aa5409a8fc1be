#pragma once

#include "hvd/error.h"

namespace hvd {

/// @addtogroup errors
/// @{

/// A checkpoint could not be written or read: the disk is full, the folder is not writable, a file
/// is damaged or missing, or the checkpoint does not fit the state. Thrown on every rank of the
/// set; the runtime continues. Complete checkpoints and the state have not changed.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// @}

}  // namespace hvd
