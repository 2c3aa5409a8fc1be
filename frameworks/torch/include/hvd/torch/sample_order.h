#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd {

/// @addtogroup data
/// @{

/// Returns the samples of an epoch, as numbers in the data set, in the order in which all ranks
/// together visit them. A number may occur several times or never. The result must depend only on
/// the epoch, so that it is the same on every rank and after a resume.
using SampleOrder = std::function<std::vector<std::size_t>(std::size_t epoch)>;

/// An order of `samples` samples per epoch, drawn with replacement, with probabilities in
/// proportion to the weights. The distribution is that of PyTorch's WeightedRandomSampler, but the
/// numbers differ. For DataLoaderOptions::order, with samples_per_epoch = samples.
/// @param weights one per sample of the data set
/// @throws UsageError for a weight that is negative or not finite, and when their sum is 0
SampleOrder weighted_order(std::vector<double> weights, std::size_t samples,
                           std::uint64_t seed = 0);

/// An order that visits every sample once, in random batches of samples of similar length, to
/// reduce padding. Samples are shuffled and sorted by length within pools of 50 batches, and the
/// batches are shuffled. A last batch that is not full remains the last.
/// @param lengths one per sample of the data set
/// @param batch samples per step on all ranks together: batch_size times the number of ranks
/// @throws UsageError when `batch` is 0
SampleOrder order_by_length(std::vector<std::size_t> lengths, std::size_t batch,
                            std::uint64_t seed = 0);

/// @}

}  // namespace hvd
