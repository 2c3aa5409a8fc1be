#pragma once

#include <torch/serialize/output-archive.h>

#include <cstddef>

#include "hvd/torch/object.h"

namespace hvd::libtorch {

/// Appends the archive's bytes, without a copy of its tensors.
inline void append(ObjectWriter& writer, torch::serialize::OutputArchive& archive) {
  archive.save_to([&writer](const void* data, std::size_t bytes) {
    writer.raw(data, bytes);
    return bytes;
  });
}

}  // namespace hvd::libtorch
