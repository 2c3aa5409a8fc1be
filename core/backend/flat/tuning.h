#pragma once

#include <cstddef>

namespace hvd::flat {

/// How messages are cut. Must be the same on every rank.
struct FlatTuning {
  /// Largest message. Small enough that what was received is still in the L2 cache when it is
  /// reduced.
  std::size_t chunk_bytes = 128 * 1024;
  /// Allreduce: pieces of the tensor under way at the same time, 1 to 4.
  int windows = 4;
  /// Allreduce: a tensor is sent whole to every rank, which saves a step, while a rank receives no
  /// more than this.
  std::size_t direct_bytes = 64 * 1024;
  /// The same of two ranks, where it is more. They send as many bytes whole as in slices, but
  /// reduce twice as many.
  std::size_t direct_pair_bytes = 0;
  /// Other collectives: chunks under way with each peer.
  int outstanding_chunks = 2;
};

}  // namespace hvd::flat
