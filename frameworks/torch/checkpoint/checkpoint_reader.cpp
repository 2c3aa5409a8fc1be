#include "checkpoint/checkpoint_reader.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "checkpoint/state_item.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {

/// The first rank chooses the checkpoint and reads its manifest and its file of replicated state.
std::optional<Manifest> CheckpointReader::choose(std::optional<std::uint64_t> step) {
  const auto results = vote_.run("choose", [&] {
    if (!vote_.first()) return std::string();
    if (!step) step = folder_.newest();
    if (!step) return std::string();
    const Manifest manifest = folder_.manifest(*step);
    common_ = folder_.read(*step, manifest.common());
    return manifest.encode();
  });
  if (results.front().empty()) return std::nullopt;
  return Manifest::decode(results.front(), "the first rank's manifest");
}

/// Decides which ranks' own state must be sent to other ranks.
/// @param own the own state of rank 0 of the checkpoint
CheckpointReader::Send CheckpointReader::send_needed(const TrainingState& state,
                                                     const Manifest& manifest,
                                                     std::string_view own) const {
  const auto items = items_in(own);
  for (const auto& entry : state.entries()) {
    const bool sharded =
        entry.item->takes_shards() && has_item(items, entry.name, kShardedOptimizer);
    const bool merged = entry.item->merges() && manifest.ranks() != vote_.ranks();
    if (sharded || merged) return Send::kAll;
  }
  return manifest.ranks() < vote_.ranks() ? Send::kToNewRanks : Send::kNone;
}

/// Rank (i modulo the current number of ranks) reads the file of rank i, and sends the share of the
/// replicated tensors to all ranks, and rank i's own state to the ranks that need it. Memory is
/// allocated inside votes, so that a rank that runs out of memory does not leave the others waiting
/// in a broadcast.
void CheckpointReader::read_ranks(const TrainingState& state, const Manifest& manifest) {
  const std::size_t rank = static_cast<std::size_t>(vote_.rank());
  const std::size_t ranks = vote_.ranks(), files = manifest.ranks();
  own_.resize(files);
  const auto results = vote_.run("read", [&] {
    if (!vote_.first()) common_.assign(manifest.common().contents.bytes, '\0');
    for (std::size_t i = rank; i < files; i += ranks)
      own_[i] = folder_.read(manifest.step, manifest.of_rank(i));
    if (!vote_.first()) return std::string();
    const std::string_view first = own_.front();
    const auto share = static_cast<std::size_t>(manifest.of_rank(0).share);
    return std::string(
        1, static_cast<char>(send_needed(state, manifest, first.substr(0, first.size() - share))));
  });
  const auto send = static_cast<Send>(results.front().front());
  vote_.broadcast_bytes("common", 0, common_.data(), common_.size());

  const auto needed = [&](std::size_t i) {
    return i == rank || send == Send::kAll || (send == Send::kToNewRanks && i == rank % files);
  };
  std::optional<ReplicatedBytes> replicated;
  std::string unneeded;  // receives files that this rank neither reads nor needs, one at a time
  vote_.run("allocate", [&] {
    if (manifest.shared_bytes() > 0) replicated.emplace(common_, manifest.shared_bytes());
    for (std::size_t i = 0; i < files; ++i) {
      if (i % ranks == rank) continue;
      const auto bytes = static_cast<std::size_t>(manifest.of_rank(i).contents.bytes);
      std::string& target = needed(i) ? own_[i] : unneeded;
      if (target.size() < bytes) target.resize(bytes);
    }
    return std::string();
  });
  for (std::size_t i = 0; i < files; ++i) {
    const CheckpointFile& file = manifest.of_rank(i);
    const std::size_t share = file.share, own = file.contents.bytes - share;
    std::string& bytes = i % ranks == rank || needed(i) ? own_[i] : unneeded;
    // Sends the whole file, or only the share at its end.
    const std::size_t begin = send == Send::kNone ? own : 0;
    vote_.broadcast_bytes("rank", i % ranks, bytes.data() + begin, own - begin + share);
    if (replicated) replicated->add_share(std::string_view(bytes).substr(own, share));
    if (needed(i)) {
      bytes.resize(own);
    } else if (i % ranks == rank) {
      std::string().swap(bytes);
    }
  }
  if (replicated) common_ = replicated->release();
}

std::function<void()> CheckpointReader::decode_shards(const TrainingState::Entry& entry) const {
  const std::string kind = entry.item->takes_shards() ? kShardedOptimizer : entry.item->kind();
  std::vector<std::string_view> shards;
  for (const std::string& bytes : own_)
    shards.push_back(find_item(items_in(bytes), entry.name, kind).bytes);
  return entry.item->decode_shards(shards);
}

std::function<void()> CheckpointReader::decode_entry(const TrainingState::Entry& entry,
                                                     bool is_new) const {
  const auto common = items_in(common_);
  const auto own = items_in(own_[static_cast<std::size_t>(vote_.rank()) % own_.size()]);
  const auto& [name, item] = entry;
  if (item->takes_shards()) {
    // Any optimizer can load the state of a sharded or of an unsharded optimizer.
    if (has_item(own, name, kShardedOptimizer)) return decode_shards(entry);
    if (has_item(common, name, kElementwiseOptimizer))
      return item->decode_shards({find_item(common, name, kElementwiseOptimizer).bytes});
    return item->decode(find_item(common, name, kWholeOptimizer).bytes);
  }
  const StoredItem& stored = find_item(item->per_rank() ? own : common, name, item->kind());
  if (item->merges() && own_.size() != vote_.ranks()) return decode_shards(entry);
  return item->per_rank() && is_new ? item->decode_for_new_rank(stored.bytes, vote_.rank())
                                    : item->decode(stored.bytes);
}

CheckpointReader::Changes CheckpointReader::decode(const TrainingState& state,
                                                   bool allow_unused) const {
  const std::size_t rank = static_cast<std::size_t>(vote_.rank());
  if (!allow_unused) {
    require_all_used(items_in(common_), state);
    require_all_used(items_in(own_[rank % own_.size()]), state);
  }
  Changes optimizers, changes;
  for (const auto& entry : state.entries()) {
    try {
      auto& list = entry.item->takes_shards() ? optimizers : changes;
      list.push_back(decode_entry(entry, rank >= own_.size()));
    } catch (const c10::Error& error) {
      throw CheckpointError("'" + entry.name + "': " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      const std::string prefix = "'" + entry.name + "'";
      const std::string text = error.what();
      throw CheckpointError(text.starts_with(prefix) ? text : prefix + ": " + text);
    }
  }
  // Change the optimizers first: only their changes may still fail.
  changes.insert(changes.begin(), optimizers.begin(), optimizers.end());
  return changes;
}

std::optional<std::uint64_t> CheckpointReader::load(const TrainingState& state,
                                                    std::optional<std::uint64_t> step,
                                                    bool allow_unused) {
  const std::string description =
      description_of(state) + " for " + (step ? "step " + std::to_string(*step) : "the newest");
  vote_.require_equal_descriptions(vote_.run("state", [&] { return description; }));
  const auto manifest = choose(step);
  if (!manifest) return std::nullopt;
  read_ranks(state, *manifest);
  Changes changes;
  vote_.run("decode", [&] {
    changes = decode(state, allow_unused);
    return std::string();
  });
  common_.clear();
  own_.clear();
  vote_.run("change", [&] {
    for (const auto& change : changes) change();
    return std::string();
  });
  return manifest->step;
}

}  // namespace hvd::libtorch
