#include "hvd/torch/sample_generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "data/mix.h"
#include "hvd/error.h"

namespace hvd {
namespace {

thread_local libtorch::SampleScope* this_threads_scope = nullptr;

}  // namespace

// LibTorch seeds a generator with 32 bits, of which a large data set would have many twice. Here
// words 1 and 2 of the state are the 64 bits of a bijection of the sample. Of word 0 the algorithm
// uses one bit.
at::Generator sample_generator(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample) {
  const std::uint64_t start = libtorch::mix(libtorch::mix(libtorch::mix(seed) ^ epoch) ^ sample);
  at::mt19937_data_pod state{};
  state.seed_ = start;
  state.left_ = 1;
  state.next_ = 0;
  state.seeded_ = true;
  state.state_[0] = 0x80000000U;
  for (std::size_t i = 1; i < state.state_.size(); ++i) {
    const std::uint64_t pair = libtorch::mix(start + (i - 1) / 2);
    state.state_[i] = static_cast<std::uint32_t>(i % 2 == 1 ? pair >> 32 : pair);
  }
  at::mt19937 engine;
  engine.set_data(state);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
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
                     "loader has asked for");
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
