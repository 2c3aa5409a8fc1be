#include "state/sharded_state.h"

#include <c10/util/ScopeExit.h>

#include <utility>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "sharded/element_state.h"
#include "sharded/shard_archive.h"
#include "state/optimizer_state.h"

namespace hvd::libtorch {
namespace {

/// The saved state of one rank: the layout, options without state, and a part of the state.
struct SavedShard {
  OptimizerLayout layout;
  std::string options;
  std::string_view part;
};

SavedShard read_shard(std::string_view bytes) {
  ObjectReader reader(bytes);
  SavedShard shard;
  shard.layout = ObjectCodec<OptimizerLayout>::read(reader);
  shard.options = ObjectCodec<std::string>::read(reader);
  const std::size_t size = reader.count(1);
  shard.part = bytes.substr(bytes.size() - reader.remaining(), size);
  reader.skip(size);
  finish_reading(reader);
  return shard;
}

}  // namespace

std::function<void()> decode_shards_into(torch::optim::Optimizer& any,
                                         const std::vector<std::string_view>& shards) {
  torch::optim::Optimizer& optimizer = unwrapped(any);
  const OptimizerLayout own = layout_of(optimizer);
  std::vector<std::string_view> parts;
  std::string options;
  for (const std::string_view bytes : shards) {
    SavedShard shard = read_shard(bytes);
    const std::string differs = difference(shard.layout, own, "the checkpoint's");
    if (!differs.empty()) throw CheckpointError(differs);
    parts.push_back(shard.part);
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

void encode_shard(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::function<void()>& part) {
  ObjectCodec<OptimizerLayout>::write(writer, layout_of(optimizer));
  writer.string([&] {
    OptimizerStates whole;  // state that was loaded and is not sharded yet
    optimizer.state().swap(whole);
    const auto give_back = c10::make_scope_exit([&] { optimizer.state().swap(whole); });
    save_optimizer(optimizer, writer);
  });
  writer.string(part);
}

bool encodes_elements(torch::optim::Optimizer& optimizer) {
  return is_elementwise(unwrapped(optimizer));
}

void encode_elements(ObjectWriter& writer, torch::optim::Optimizer& any) {
  torch::optim::Optimizer& optimizer = unwrapped(any);
  encode_shard(writer, optimizer, [&] { encode_whole(writer, optimizer, /*replicated=*/true); });
}

}  // namespace hvd::libtorch
