#include "state/sharded_state.h"

#include <c10/util/ScopeExit.h>

#include <utility>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "optimizer/shard_archive.h"
#include "state/optimizer_state.h"

namespace hvd::libtorch {
namespace {

/// What one rank saves: type and shapes, options without state, its part of the state.
struct SavedShard {
  OptimizerLayout layout;
  std::string options;
  std::string part;
};

SavedShard read_shard(std::string_view bytes) {
  ObjectReader reader(bytes);
  SavedShard shard;
  shard.layout = ObjectCodec<OptimizerLayout>::read(reader);
  shard.options = ObjectCodec<std::string>::read(reader);
  shard.part = ObjectCodec<std::string>::read(reader);
  finish_reading(reader);
  return shard;
}

}  // namespace

std::function<void()> decode_shards_into(torch::optim::Optimizer& any,
                                         const std::vector<std::string_view>& shards) {
  torch::optim::Optimizer& optimizer = unwrapped(any);
  const OptimizerLayout own = layout_of(optimizer);
  std::vector<std::string> parts;
  std::string options;
  for (const std::string_view bytes : shards) {
    SavedShard shard = read_shard(bytes);
    const std::string differs = difference(shard.layout, own, "the checkpoint's");
    if (!differs.empty()) throw CheckpointError(differs);
    parts.push_back(std::move(shard.part));
    if (options.empty()) options = std::move(shard.options);
  }
  return [&any, &optimizer, options, join = join_parts(optimizer, parts)] {
    const std::string before = save_optimizer(optimizer);
    try {
      OptimizerStates states = join();
      load_optimizer(any, options);
      optimizer.state().swap(states);
    } catch (...) {
      load_optimizer(any, before);
      throw;
    }
  };
}

std::string encode_shard(torch::optim::Optimizer& optimizer, const std::string& part) {
  OptimizerStates whole;  // loaded, and not shared out yet
  optimizer.state().swap(whole);
  const auto give_back = c10::make_scope_exit([&] { optimizer.state().swap(whole); });
  ObjectWriter writer;
  ObjectCodec<OptimizerLayout>::write(writer, layout_of(optimizer));
  ObjectCodec<std::string>::write(writer, save_optimizer(optimizer));
  ObjectCodec<std::string>::write(writer, part);
  return writer.take();
}

}  // namespace hvd::libtorch
