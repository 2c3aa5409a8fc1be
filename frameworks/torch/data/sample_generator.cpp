#include "hvd/torch/sample_generator.h"

#include <algorithm>

#include "data/reproducible.h"
#include "hvd/error.h"

namespace hvd {
namespace {

thread_local libtorch::SampleScope* this_threads_scope = nullptr;

}  // namespace

// For a given seed and epoch, every sample has a different generator, because mix() is a bijection.
at::Generator sample_generator(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample) {
  return libtorch::generator_from(
      libtorch::mix(libtorch::mix(libtorch::mix(seed) ^ epoch) ^ sample));
}

at::Generator sample_generator(std::size_t sample) {
  return libtorch::SampleScope::current().generator_of(sample);
}

namespace libtorch {

SampleScope::SampleScope(std::uint64_t seed, std::uint64_t epoch,
                         const std::vector<std::size_t>& samples)
    : seed_(seed),
      epoch_(epoch),
      samples_(samples),
      generators_(samples.size()),
      outer_(this_threads_scope) {
  this_threads_scope = this;
}

SampleScope::~SampleScope() { this_threads_scope = outer_; }

SampleScope& SampleScope::current() {
  if (this_threads_scope == nullptr) {
    throw UsageError(
        "sample_generator: this thread is not loading a batch for a loader from "
        "hvd::make_data_loader(); expected a call from a data set or a transform of one; elsewhere "
        "use sample_generator(seed, epoch, sample)");
  }
  return *this_threads_scope;
}

at::Generator& SampleScope::generator_at(std::size_t position) {
  at::Generator& generator = generators_[position];
  if (!generator.defined()) generator = sample_generator(seed_, epoch_, samples_[position]);
  return generator;
}

at::Generator& SampleScope::generator_of(std::size_t sample) {
  const auto found = std::find(samples_.begin(), samples_.end(), sample);
  if (found == samples_.end()) {
    throw UsageError("sample_generator: sample " + std::to_string(sample) +
                     " is not in the batch that this thread is loading; expected an index that the "
                     "loader has requested");
  }
  return generator_at(static_cast<std::size_t>(found - samples_.begin()));
}

SampleScope& scope_of_batch(std::size_t examples) {
  SampleScope& scope = SampleScope::current();
  if (scope.size() != examples) {
    throw UsageError("random_transform: got " + std::to_string(examples) +
                     " examples, expected one for each of the " + std::to_string(scope.size()) +
                     " samples of the batch; put it before transforms that change their number");
  }
  return scope;
}

}  // namespace libtorch
}  // namespace hvd
