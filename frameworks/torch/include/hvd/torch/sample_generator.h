#pragma once

#include <ATen/core/Generator.h>
#include <torch/data/example.h>
#include <torch/data/transforms/base.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace hvd {

/// @addtogroup data
/// @{

/// A CPU generator for one sample in one epoch. Its numbers depend only on the arguments. Any two
/// samples of an epoch start in different states. Thread-safe.
at::Generator sample_generator(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample);

/// The same for a sample that a hvd::DataLoader is loading in this thread, for the `get()` of a
/// data set: `torch::rand({2}, hvd::sample_generator(index))`. While a batch is loaded, every call
/// for a sample returns the same generator, in the state in which earlier uses have left it.
/// @throws UsageError outside a loader, and for a sample that is not in the batch
at::Generator sample_generator(std::size_t sample);

namespace libtorch {

/// Holds a generator for each sample of the batch that this thread is loading. Scopes nest.
class SampleScope {
 public:
  SampleScope(std::uint64_t seed, std::uint64_t epoch, const std::vector<std::size_t>& samples);
  SampleScope(const SampleScope&) = delete;
  SampleScope& operator=(const SampleScope&) = delete;
  ~SampleScope();

  /// The innermost scope of this thread. @throws UsageError outside every scope
  static SampleScope& current();

  std::size_t size() const noexcept { return samples_.size(); }
  at::Generator& generator_at(std::size_t position);
  at::Generator& generator_of(std::size_t sample);

 private:
  const std::uint64_t seed_, epoch_;
  const std::vector<std::size_t>& samples_;
  std::vector<at::Generator> generators_;  ///< by position; undefined until it is used
  SampleScope* const outer_;
};

/// The scope of this thread's batch. @throws UsageError when its size is not `examples`
SampleScope& scope_of_batch(std::size_t examples);

}  // namespace libtorch

/// A transform with random numbers, for a data set's `map()`. See random_transform().
template <class Input, class Function>
class RandomTransform
    : public torch::data::transforms::BatchTransform<
          std::vector<Input>, std::vector<std::invoke_result_t<Function&, Input, at::Generator&>>> {
 public:
  using Output = std::invoke_result_t<Function&, Input, at::Generator&>;

  explicit RandomTransform(Function function) : function_(std::move(function)) {}

  /// @throws UsageError outside a hvd::DataLoader, and when a transform before this one has changed
  /// the number of examples
  std::vector<Output> apply_batch(std::vector<Input> batch) override {
    libtorch::SampleScope& scope = libtorch::scope_of_batch(batch.size());
    std::vector<Output> results;
    results.reserve(batch.size());
    for (std::size_t i = 0; i < batch.size(); ++i)
      results.push_back(function_(std::move(batch[i]), scope.generator_at(i)));
    return results;
  }

 private:
  Function function_;
};

/// `dataset.map(hvd::random_transform([](torch::data::Example<> example, at::Generator& generator)
/// {...}))`: the function receives each example with the generator of its sample (see
/// sample_generator()) and returns the transformed example. Each worker has a copy of the function.
/// Place it before `Stack`, which turns a batch into one example. Several random transforms use the
/// same generator one after the other.
template <class Input = torch::data::Example<>, class Function>
RandomTransform<Input, Function> random_transform(Function function) {
  return RandomTransform<Input, Function>(std::move(function));
}

/// @}

}  // namespace hvd
