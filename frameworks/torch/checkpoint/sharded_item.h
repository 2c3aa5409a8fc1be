#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/sharded_optimizer.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// The kinds of what is saved of an optimizer: by the first rank all, or by each rank its part.
inline constexpr const char* kWholeOptimizer = "optimizer";
inline constexpr const char* kShardedOptimizer = "sharded optimizer";

/// The part of an optimizer's state that a rank has. It is loaded as a whole, and then shared out.
class ShardedOptimizerItem final : public StateItem {
 public:
  explicit ShardedOptimizerItem(ShardedOptimizer& optimizer) : optimizer_(optimizer) {}
  std::string kind() const override { return kShardedOptimizer; }
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  /// Takes what OptimizerItem has made.
  std::function<void()> decode(std::string_view bytes) override;
  bool takes_shards() const override { return true; }
  void broadcast(int root_rank, const std::string& name) override;
  std::function<void()> decode_shards(const std::vector<std::string_view>& shards) override;

 private:
  ShardedOptimizer& optimizer_;
};

}  // namespace hvd::libtorch
