#pragma once

#include <c10/util/Synchronized.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// The exchanges of a layer with the same layer on the other ranks of its set: repeated operations
/// on small tensors, for which the forward or backward pass waits. On the CPU, names, descriptions
/// and memory are made once, so a repeated exchange costs only the runtime's operation and two
/// copies of a few kilobytes. Blocking; each function may be used by one thread at a time.
class LayerExchange {
 public:
  /// @param name the same on every rank of the set
  LayerExchange(std::string name, ProcessSet process_set);
  ~LayerExchange();
  LayerExchange(const LayerExchange&) = delete;
  LayerExchange& operator=(const LayerExchange&) = delete;

  const std::string& name() const noexcept { return name_; }

  /// The rows of all ranks that have not joined, in rank order, of shape [ranks, columns]. Valid
  /// until the next call. @param row this rank's row, of shape [1, columns] @throws as every
  /// collective
  torch::Tensor gathered(const torch::Tensor& row);
  /// The sum over all ranks. Valid until the next call. @throws as every collective
  torch::Tensor summed(const torch::Tensor& sums);

 private:
  struct Kept;
  using KeptPtr = std::unique_ptr<Kept>;

  KeptPtr make_gathering(const torch::Tensor& row) const;
  KeptPtr make_sum(const torch::Tensor& sums) const;
  KeptPtr make(const torch::Tensor& input, std::int64_t rows, const char* suffix) const;
  static torch::Tensor exchange(KeptPtr kept, const torch::Tensor& input,
                                c10::Synchronized<KeptPtr>& place);

  const std::string name_;
  const ProcessSet process_set_;
  /// Null during an exchange, and after one that failed. The operation keeps the memory alive,
  /// since other ranks may still write to it.
  c10::Synchronized<KeptPtr> gathering_, sum_;
};

/// Makes the exchange of a layer and numbers it. Call it when the layer is first used, so that
/// ranks may construct different unused layers.
std::shared_ptr<LayerExchange> make_layer_exchange(const ProcessSet& process_set);

}  // namespace hvd::libtorch
