#include <algorithm>
#include <utility>

#include "base/text.h"
#include "data/reproducible.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/elastic.h"

namespace hvd::elastic {

Sampler::Sampler(std::size_t dataset_size, SamplerOptions options)
    : dataset_size_(dataset_size), options_(options) {
  if (dataset_size == 0)
    throw UsageError("hvd::elastic::Sampler: expected a data set with samples, got an empty one");
  if ((options.batch > 0) == (options.global_batch > 0)) {
    throw UsageError(
        text("hvd::elastic::Sampler: expected either batch or global_batch, got batch ",
             options.batch, " and global_batch ", options.global_batch));
  }
}

void Sampler::set_epoch(std::size_t epoch) {
  if (epoch != position_.epoch) position_ = {.epoch = epoch, .used = 0};
}

std::optional<std::vector<std::size_t>> Sampler::next() {
  const auto ranks = static_cast<std::size_t>(size());
  const auto own_rank = static_cast<std::size_t>(rank());
  const std::size_t full =
      options_.global_batch > 0 ? options_.global_batch : options_.batch * ranks;
  if (full < ranks) {
    throw UsageError(
        text("hvd::elastic::Sampler: global_batch: expected at least one sample for "
             "each of ",
             ranks, " ranks, got ", full));
  }
  const std::size_t used = samples_used();
  const std::size_t left = dataset_size_ - std::min(used, dataset_size_);
  if (left == 0 || (left < full && options_.drop_last)) return std::nullopt;
  const std::size_t step = std::max(std::min(left, full), ranks);
  if (order_epoch_ != position_.epoch) {
    order_ = libtorch::epoch_order(dataset_size_, options_.shuffle, options_.seed, position_.epoch);
    order_epoch_ = position_.epoch;
  }
  std::vector<std::size_t> own;
  for (std::size_t i = own_rank; i < step; i += ranks)
    own.push_back(order_[(used + i) % dataset_size_]);
  position_.used = std::min(used + step, dataset_size_);
  return own;
}

}  // namespace hvd::elastic
