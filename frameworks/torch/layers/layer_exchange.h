#pragma once

#include <c10/util/Synchronized.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// What a layer exchanges with the same layer on the other ranks of its set: small tensors, again
/// and again, for which everything waits. In the host's memory names, descriptions and memory are
/// made once, so that a repeated exchange costs the runtime's operation and two copies of some
/// kilobytes. Blocking; one thread at a time in each function.
class LayerExchange {
 public:
  /// @param name the same on every rank of the set
  LayerExchange(std::string name, ProcessSet process_set);
  ~LayerExchange();
  LayerExchange(const LayerExchange&) = delete;
  LayerExchange& operator=(const LayerExchange&) = delete;

  const std::string& name() const noexcept { return name_; }

  /// The rows of all ranks that have not joined, in rank order: [ranks, columns]. Valid until the
  /// next call. @param row of this rank, [1, columns]. @throws as every collective
  torch::Tensor gathered(const torch::Tensor& row);
  /// The sum over all ranks. Valid until the next call. @throws as every collective
  torch::Tensor summed(const torch::Tensor& sums);

 private:
  struct Kept;
  using KeptPtr = std::unique_ptr<Kept>;

  /// Has nothing while an exchange is under way. One that fails takes the memory along, as peers
  /// may still write to it.
  using KeptPlace = c10::Synchronized<KeptPtr>;

  KeptPtr make_gathering(const torch::Tensor& row) const;
  KeptPtr make_sum(const torch::Tensor& sums) const;
  KeptPtr make(const torch::Tensor& input, std::int64_t rows, const char* suffix) const;
  static torch::Tensor exchange(KeptPtr kept, const torch::Tensor& input, KeptPlace& place);

  const std::string name_;
  const ProcessSet process_set_;
  KeptPlace gathering_, sum_;
};

/// The exchange of a layer, made when it is first needed: it gets its number then, so that ranks
/// may construct other layers besides.
std::shared_ptr<LayerExchange> make_layer_exchange(const ProcessSet& process_set);

}  // namespace hvd::libtorch
