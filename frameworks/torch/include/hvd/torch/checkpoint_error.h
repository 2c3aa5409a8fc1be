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

/// A safetensors file could not be written or read, is damaged, or does not fit the tensors. Thrown
/// on the rank that made the call. The file and the tensors have not changed.
class SafetensorsError : public Error {
 public:
  using Error::Error;
};

/// @}

}  // namespace hvd
