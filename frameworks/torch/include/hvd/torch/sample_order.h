#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd {

/// The samples of an epoch, by their numbers in the data set, in the order in which all ranks
/// together visit them. A number may occur several times or never. It depends on the epoch alone,
/// so that every rank gets the same and a resumed program goes on with it.
using SampleOrder = std::function<std::vector<std::size_t>(std::size_t epoch)>;

/// `samples` numbers per epoch, each drawn with replacement with a probability in proportion to its
/// weight, as PyTorch's WeightedRandomSampler draws them (but not the same ones). For
/// DataLoaderOptions::order, with samples_per_epoch = samples.
/// @param weights one per sample of the data set
/// @throws UsageError for a weight that is negative or not finite, and when their sum is 0
SampleOrder weighted_order(std::vector<double> weights, std::size_t samples,
                           std::uint64_t seed = 0);

/// Every sample once, in random batches of samples of like length, so that little of a padded batch
/// is padding. Samples are shuffled, sorted by length within pools of 50 batches, and the batches
/// are shuffled; a last batch that is not full stays the last.
/// @param lengths one per sample of the data set
/// @param batch samples per step on all ranks together: batch_size times the number of ranks
/// @throws UsageError when it is 0
SampleOrder order_by_length(std::vector<std::size_t> lengths, std::size_t batch,
                            std::uint64_t seed = 0);

}  // namespace hvd
