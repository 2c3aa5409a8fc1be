#include "hvd/torch/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>

#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd {

namespace {

std::size_t position_in(const ProcessSet& set) {
  if (!set.included())
    throw UsageError("DistributedSampler: this rank is not in process set " +
                     std::to_string(set.id()));
  return static_cast<std::size_t>(set.rank());
}

}  // namespace

struct DistributedSampler::State {
  const SamplerOptions options;
  const std::size_t rank;
  const std::size_t replicas;
  std::mutex mutex;
  // Guarded by mutex.
  std::size_t dataset_size;
  std::size_t epoch = 0;
  std::size_t position = 0;
  bool drawn = false;  ///< `indices` belongs to the epoch and the size
  std::vector<std::size_t> indices;

  std::size_t per_rank() const {
    return options.drop_last ? dataset_size / replicas : (dataset_size + replicas - 1) / replicas;
  }
  void draw();
};

/// PyTorch's order (torch/utils/data/distributed.py): a permutation by a generator seeded with seed
/// + epoch.
void DistributedSampler::State::draw() {
  std::vector<std::size_t> order(dataset_size);
  if (options.shuffle) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed + epoch);
    const torch::Tensor permutation = torch::randperm(
        static_cast<std::int64_t>(dataset_size), generator, torch::TensorOptions(torch::kInt64));
    const auto* data = permutation.const_data_ptr<std::int64_t>();
    std::transform(data, data + dataset_size, order.begin(),
                   [](std::int64_t i) { return static_cast<std::size_t>(i); });
  } else {
    std::iota(order.begin(), order.end(), std::size_t{0});
  }
  indices.resize(per_rank());
  for (std::size_t i = 0; i < indices.size(); ++i)
    indices[i] = order[(rank + i * replicas) % dataset_size];
  drawn = true;
}

DistributedSampler::DistributedSampler(std::size_t dataset_size, SamplerOptions options)
    : state_(new State{.options = options,
                       .rank = position_in(options.process_set),
                       .replicas = static_cast<std::size_t>(options.process_set.size()),
                       .mutex = {},
                       .dataset_size = dataset_size,
                       .indices = {}}) {}

void DistributedSampler::set_epoch(std::size_t epoch) {
  const std::lock_guard lock(state_->mutex);
  state_->epoch = epoch;
  if (state_->position == 0) state_->drawn = false;
}

std::size_t DistributedSampler::epoch() const {
  const std::lock_guard lock(state_->mutex);
  return state_->epoch;
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  const std::lock_guard lock(state_->mutex);
  if (new_size) state_->dataset_size = *new_size;
  state_->position = 0;
  state_->drawn = false;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->drawn) state_->draw();
  const std::size_t left =
      state_->indices.size() - std::min(state_->position, state_->indices.size());
  if (left == 0 || batch_size == 0) return std::nullopt;
  const auto begin = state_->indices.begin() + static_cast<std::ptrdiff_t>(state_->position);
  const std::size_t taken = std::min(batch_size, left);
  state_->position += taken;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(taken));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const std::lock_guard lock(state_->mutex);
  const std::vector<std::int64_t> values{static_cast<std::int64_t>(state_->dataset_size),
                                         static_cast<std::int64_t>(state_->epoch),
                                         static_cast<std::int64_t>(state_->position)};
  archive.write("hvd_sampler", torch::tensor(values, torch::kInt64), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  torch::Tensor values;
  archive.read("hvd_sampler", values, /*is_buffer=*/true);
  const std::lock_guard lock(state_->mutex);
  const auto saved_size = static_cast<std::size_t>(values[0].item<std::int64_t>());
  if (saved_size != state_->dataset_size) {
    throw UsageError("DistributedSampler::load: expected the state of a data set of " +
                     std::to_string(state_->dataset_size) + " samples, got one of " +
                     std::to_string(saved_size));
  }
  state_->epoch = static_cast<std::size_t>(values[1].item<std::int64_t>());
  state_->position = static_cast<std::size_t>(values[2].item<std::int64_t>());
  state_->drawn = false;
}

std::size_t DistributedSampler::size() const {
  const std::lock_guard lock(state_->mutex);
  return state_->per_rank();
}

std::size_t DistributedSampler::index() const {
  const std::lock_guard lock(state_->mutex);
  return state_->position;
}

}  // namespace hvd
