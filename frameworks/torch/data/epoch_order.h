#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvd::libtorch {

/// The order in which PyTorch's DistributedSampler visits a data set
/// (torch/utils/data/distributed.py): a permutation by a generator seeded with seed + epoch, or the
/// data set's own.
std::vector<std::size_t> epoch_order(std::size_t dataset_size, bool shuffle, std::uint64_t seed,
                                     std::uint64_t epoch);

}  // namespace hvd::libtorch
