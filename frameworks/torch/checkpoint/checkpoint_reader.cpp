#include "checkpoint/checkpoint_reader.h"

#include <c10/util/Exception.h>

#include "checkpoint/sharded_item.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

bool is_optimizer(const TrainingState::Entry& entry) { return entry.item->takes_shards(); }

}  // namespace

/// The first rank chooses and reads what is the same on all ranks.
std::optional<Manifest> CheckpointReader::choose(std::optional<std::uint64_t> step) {
  const auto said = talk_.after("choose", [&] {
    if (!talk_.first()) return std::string();
    if (!step) step = folder_.newest();
    if (!step) return std::string();
    const Manifest manifest = folder_.manifest(*step);
    common_ = folder_.read(*step, manifest.common());
    return manifest.encode();
  });
  if (said.front().empty()) return std::nullopt;
  talk_.broadcast_bytes("common", common_);
  return Manifest::decode(said.front(), "the first rank's manifest");
}

/// Each file is read by somebody, also when there are fewer ranks now.
/// @return this rank's; of one that is new that of another
std::string CheckpointReader::read_own(const Manifest& manifest) const {
  const auto rank = static_cast<std::size_t>(talk_.rank());
  const auto ranks = static_cast<std::size_t>(talk_.process_set().size());
  std::string own = folder_.read(manifest.step, manifest.of_rank(rank % manifest.ranks()));
  for (std::size_t other = rank + ranks; other < manifest.ranks(); other += ranks)
    folder_.read(manifest.step, manifest.of_rank(other));
  return own;
}

/// Of all ranks that there were.
std::function<void()> CheckpointReader::decode_shards(const TrainingState::Entry& entry,
                                                      const Manifest& manifest) const {
  std::vector<std::string> files;
  for (std::size_t rank = 0; rank < manifest.ranks(); ++rank)
    files.push_back(folder_.read(manifest.step, manifest.of_rank(rank)));
  const std::string kind = is_optimizer(entry) ? kShardedOptimizer : entry.item->kind();
  std::vector<std::string_view> shards;
  for (const std::string& file : files)
    shards.push_back(find_item(items_in(file), entry.name, kind).bytes);
  return entry.item->decode_shards(shards);
}

CheckpointReader::Changes CheckpointReader::decode(const TrainingState& state,
                                                   const Manifest& manifest,
                                                   bool allow_unused) const {
  const std::string own = read_own(manifest);
  const auto common_items = items_in(common_);
  const auto own_items = items_in(own);
  if (!allow_unused) {
    require_all_used(common_items, state);
    require_all_used(own_items, state);
  }
  const auto ranks = static_cast<std::size_t>(talk_.process_set().size());
  const bool is_new = static_cast<std::size_t>(talk_.rank()) >= manifest.ranks();
  Changes optimizers, changes;
  for (const auto& entry : state.entries()) {
    // An optimizer takes what was saved of one, sharded or not.
    const bool optimizer = is_optimizer(entry);
    const bool sharded = optimizer && has_item(own_items, entry.name, kShardedOptimizer);
    const bool per_rank = optimizer ? sharded : entry.item->per_rank();
    const std::string kind = !optimizer ? entry.item->kind()
                             : sharded  ? kShardedOptimizer
                                        : kWholeOptimizer;
    const StoredItem& stored = find_item(per_rank ? own_items : common_items, entry.name, kind);
    const auto change = [&] {
      try {
        const bool merged = entry.item->merges() && manifest.ranks() != ranks;
        if (sharded || merged) return decode_shards(entry, manifest);
        return per_rank && is_new ? entry.item->decode_for_new_rank(stored.bytes, talk_.rank())
                                  : entry.item->decode(stored.bytes);
      } catch (const c10::Error& error) {
        throw CheckpointError("'" + entry.name + "': " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        throw CheckpointError("'" + entry.name + "': " + error.what());
      }
    };
    (is_optimizer(entry) ? optimizers : changes).push_back(change());
  }
  // LibTorch's optimizers first, the only ones that may refuse at the last moment.
  changes.insert(changes.begin(), optimizers.begin(), optimizers.end());
  return changes;
}

std::optional<std::uint64_t> CheckpointReader::load(const TrainingState& state,
                                                    std::optional<std::uint64_t> step,
                                                    bool allow_unused) {
  const std::string own =
      description_of(state) + " for " + (step ? "step " + std::to_string(*step) : "the newest");
  require_equal(talk_.after("state", [&] { return own; }), talk_.process_set(), "load_checkpoint");
  const auto manifest = choose(step);
  if (!manifest) return std::nullopt;
  Changes changes;
  talk_.after("decode", [&] {
    changes = decode(state, *manifest, allow_unused);
    return std::string();
  });
  common_.clear();
  talk_.after("change", [&] {
    for (const auto& change : changes) change();
    return std::string();
  });
  return manifest->step;
}

}  // namespace hvd::libtorch
