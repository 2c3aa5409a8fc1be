#include "checkpoint/sharded_item.h"

#include <memory>
#include <utility>

#include "checkpoint/state_item.h"
#include "hvd/torch/parameters.h"
#include "state/sharded_state.h"

namespace hvd::libtorch {
void ShardedOptimizerItem::encode(ObjectWriter& writer) const {
  encode_shard(writer, optimizer_.inner(), [&] { optimizer_.encode_part(writer); });
}

std::function<void()> ShardedOptimizerItem::decode(std::string_view bytes) {
  const auto item = std::make_shared<OptimizerItem>(optimizer_);
  const std::function<void()> change = item->decode(bytes);
  return [this, item, change] {
    change();
    optimizer_.share_out_anew();
  };
}

std::function<void()> ShardedOptimizerItem::decode_shards(
    const std::vector<std::string_view>& shards) {
  const std::function<void()> change = decode_shards_into(optimizer_, shards);
  return [this, change] {
    change();
    optimizer_.share_out_anew();
  };
}

void ShardedOptimizerItem::broadcast(int root_rank, const std::string& /*name*/) {
  broadcast_optimizer_state(optimizer_, root_rank);
}

}  // namespace hvd::libtorch
