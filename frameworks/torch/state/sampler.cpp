#include "hvd/torch/sampler.h"

#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <string>

#include "data/reproducible.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"

namespace hvd {

namespace {

std::size_t position_in(const ProcessSet& set) {
  libtorch::require_member("DistributedSampler", set);
  return static_cast<std::size_t>(set.rank());
}

}  // namespace

struct DistributedSampler::State {
  SamplerOptions options;
  std::size_t rank;
  std::size_t replicas;
  std::size_t dataset_size;
  std::size_t epoch = 0;
  /// Number of samples of the epoch's order that were drawn, by any number of ranks, before the
  /// current enumeration began; greater than 0 after load().
  std::size_t start = 0;
  std::size_t position = 0;  ///< samples that this rank has drawn in this enumeration
  bool resumed = false;      ///< load() was called, and reset() was not called after it
  bool drawn = false;        ///< `indices` is valid for the epoch and the size
  std::vector<std::size_t> indices = {};

  std::size_t per_rank() const {
    const std::size_t left = dataset_size - std::min(start, dataset_size);
    return options.drop_last ? left / replicas : (left + replicas - 1) / replicas;
  }
  void begin_anew() {
    start = position = 0;
    resumed = drawn = false;
  }
  void draw();
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size);
};

void DistributedSampler::State::draw() {
  const std::vector<std::size_t> order =
      libtorch::epoch_order(dataset_size, options.shuffle, options.seed, epoch);
  indices.resize(per_rank());
  for (std::size_t i = 0; i < indices.size(); ++i)
    indices[i] = order[(start + rank + i * replicas) % dataset_size];
  drawn = true;
}

DistributedSampler::DistributedSampler(std::size_t dataset_size, SamplerOptions options)
    : state_(std::make_shared<c10::Synchronized<State>>(
          State{.options = options,
                .rank = position_in(options.process_set),
                .replicas = static_cast<std::size_t>(options.process_set.size()),
                .dataset_size = dataset_size})) {}

void DistributedSampler::set_epoch(std::size_t epoch) {
  state_->withLock([&](State& state) {
    if (state.resumed && state.epoch != epoch) state.begin_anew();
    state.epoch = epoch;
    if (state.position == 0) state.drawn = false;
  });
}

std::size_t DistributedSampler::epoch() const {
  return state_->withLock([](const State& state) { return state.epoch; });
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  state_->withLock([&](State& state) {
    // A data loader makes the first call after load(), and continues from the saved position.
    const bool goes_on = state.resumed && !new_size;
    state.resumed = false;
    if (goes_on) return;
    if (new_size) state.dataset_size = *new_size;
    state.begin_anew();
  });
}

std::optional<std::vector<std::size_t>> DistributedSampler::State::next(std::size_t batch_size) {
  if (!drawn) draw();
  const std::size_t left = indices.size() - std::min(position, indices.size());
  if (left == 0 || batch_size == 0) return std::nullopt;
  const auto begin = indices.begin() + static_cast<std::ptrdiff_t>(position);
  const std::size_t taken = std::min(batch_size, left);
  position += taken;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(taken));
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  return state_->withLock([&](State& state) { return state.next(batch_size); });
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto values = state_->withLock([](const State& state) {
    const std::size_t used = state.start + state.position * state.replicas;
    return std::vector<std::int64_t>{
        static_cast<std::int64_t>(state.dataset_size), static_cast<std::int64_t>(state.epoch),
        static_cast<std::int64_t>(used), static_cast<std::int64_t>(state.options.seed),
        state.options.shuffle ? 1 : 0};
  });
  archive.write("hvd_sampler", torch::tensor(values, torch::kInt64), /*is_buffer=*/true);
}

DistributedSampler::Saved DistributedSampler::read(torch::serialize::InputArchive& archive) const {
  torch::Tensor values;
  archive.read("hvd_sampler", values, /*is_buffer=*/true);
  constexpr std::int64_t kValues = 5;
  if (values.numel() != kValues) {
    throw UsageError("DistributedSampler::load: expected " + std::to_string(kValues) +
                     " numbers, got " + std::to_string(values.numel()) +
                     "; it was saved by another version of hvd");
  }
  const auto value = [&](int i) { return values[i].item<std::int64_t>(); };
  const auto expect = [](const std::string& what, std::uint64_t expected, std::uint64_t got) {
    if (expected == got) return;
    throw UsageError("DistributedSampler::load: expected the state of " + what + ' ' +
                     std::to_string(expected) + ", got one of " + std::to_string(got));
  };
  state_->withLock([&](const State& state) {
    expect("a data set of samples:", state.dataset_size, static_cast<std::uint64_t>(value(0)));
    expect("a sampler with shuffle =", state.options.shuffle ? 1 : 0,
           static_cast<std::uint64_t>(value(4)));
    // Without shuffling the seed is not used.
    if (state.options.shuffle)
      expect("a sampler with seed =", state.options.seed, static_cast<std::uint64_t>(value(3)));
  });
  return {.epoch = static_cast<std::size_t>(value(1)), .used = static_cast<std::size_t>(value(2))};
}

void DistributedSampler::check(torch::serialize::InputArchive& archive) const { read(archive); }

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const Saved saved = read(archive);
  state_->withLock([&](State& state) {
    state.begin_anew();
    state.epoch = saved.epoch;
    state.start = saved.used;
    // If the last sample was drawn, the epoch starts again from its beginning.
    state.resumed = state.per_rank() > 0;
  });
}

std::size_t DistributedSampler::size() const {
  return state_->withLock(
      [](const State& state) { return state.start / state.replicas + state.per_rank(); });
}

std::size_t DistributedSampler::index() const {
  return state_->withLock(
      [](const State& state) { return state.start / state.replicas + state.position; });
}

}  // namespace hvd
