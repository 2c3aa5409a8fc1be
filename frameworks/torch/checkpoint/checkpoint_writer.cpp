#include "checkpoint/checkpoint_writer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "checkpoint/safetensors_save.h"
#include "checkpoint/state_item.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {
namespace {

/// Size, checksum and share of each file that a rank has written.
using Written = std::vector<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>>;

/// A rank's description of a state, and the bytes and hash of its replicated tensors.
using StateStatement = std::tuple<std::string, std::uint64_t, std::uint64_t>;

/// How many ranks write shares of the replicated bytes; 0 if one rank writes all of them, because
/// they are few.
std::size_t count_writers(std::uint64_t bytes, std::size_t ranks) {
  constexpr std::uint64_t kSmallestShare = std::uint64_t{256} << 10;
  const auto writers = static_cast<std::size_t>(
      std::min<std::uint64_t>(bytes / kSmallestShare, static_cast<std::uint64_t>(ranks)));
  return writers < 2 ? 0 : writers;
}

/// Replaces `files` by one for each of the state's models, and reuses the memory of earlier ones.
/// @throws UsageError for a name that cannot be a file's
void fill_models(const TrainingState& state, std::map<std::string, ModelFile>& files) {
  std::map<std::string, ModelFile> filled;
  for (const auto& [name, item] : state.entries()) {
    const auto* const model = dynamic_cast<const ModuleItem*>(item.get());
    if (model == nullptr) continue;
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
      throw UsageError("safetensors: the model '" + name +
                       "' gives its name to a file; expected a name without '/'");
    }
    const std::string file = CheckpointFolder::model_name(name);
    auto& [bytes, memory] = filled[file];
    bytes.parts.push_back(safetensors_text(model->state_dict(), {{"format", "pt"}}));
    if (const auto before = files.find(file); before != files.end())
      memory = std::move(before->second.memory);
  }
  files = std::move(filled);
}

/// A thread that writes in the background may outlive its generation, and the ranks of the next
/// generation do not take part in its votes.
void require_same_ranks(const Snapshot& snapshot) {
  if (present_generation() == snapshot.writer) return;
  throw CheckpointError(text("the checkpoint of step ", snapshot.step,
                             " was not completed, because the ranks of the elastic job have "
                             "changed; the next one will be"));
}

}  // namespace

void Snapshot::free_memory() {
  common = {};
  own = {};
  models.clear();
  for (std::string* const memory : {&common_memory, &own_memory}) std::string().swap(*memory);
}

std::size_t CheckpointWriter::encode_common(const TrainingState& state,
                                            const std::string& description,
                                            std::vector<TensorText>& common) {
  const auto statements = vote_.run("state", [&] {
    common = encode_items(state, vote_.first() ? Items::kReplicated : Items::kReplicatedTensors);
    const auto replicated = ReplicatedTensors::in(common, /*remove=*/false);
    const bool shared = count_writers(replicated.bytes(), vote_.ranks()) > 0;
    return encode_object(
        StateStatement{description, replicated.bytes(), shared ? replicated.hash() : 0});
  });
  std::vector<std::string> descriptions;
  std::set<std::pair<std::uint64_t, std::uint64_t>> tensors;
  for (const std::string& statement : statements) {
    auto [theirs, bytes, hash] = decode_object<StateStatement>(statement);
    descriptions.push_back(std::move(theirs));
    tensors.emplace(bytes, hash);
  }
  vote_.require_equal_descriptions(descriptions);
  if (tensors.size() > 1) return 0;
  return count_writers(ReplicatedTensors::in(common, /*remove=*/false).bytes(), vote_.ranks());
}

void CheckpointWriter::take_snapshot(const TrainingState& state, std::optional<std::uint64_t> step,
                                     std::optional<std::uint64_t> loaded, bool copy,
                                     Snapshot& snapshot) {
  snapshot.common = {};
  snapshot.own = {};
  snapshot.loaded = loaded;
  snapshot.writer = present_generation();
  const std::string description =
      description_of(state, /*with_contents=*/true) + " for " +
      (step ? "step " + std::to_string(*step) : "the step after the newest") +
      (loaded && elastic::generation() == 0 ? ", replacing steps after " + std::to_string(*loaded)
                                            : std::string());
  std::vector<TensorText> common;
  const std::size_t writers = encode_common(state, description, common);
  const ReplicatedTensors replicated = ReplicatedTensors::in(common, /*remove=*/false);
  bool begun = false;
  try {
    const auto results = vote_.run("begin", [&] {
      snapshot.own.parts = encode_items(state, Items::kOfRank);
      snapshot.own.share = replicated.share(writers, static_cast<std::size_t>(vote_.rank()));
      if (vote_.first()) {
        if (writers > 0) {
          ReplicatedTensors::in(common, /*remove=*/true);
          common.insert(common.begin(), TensorText{encode_object(replicated.positions), {}});
        }
        snapshot.common.parts = std::move(common);
        if (safetensors_) fill_models(state, snapshot.models);
      }
      if (copy) {
        snapshot.common.copy_into(snapshot.common_memory);
        snapshot.own.copy_into(snapshot.own_memory);
        for (auto& [name, model] : snapshot.models) model.bytes.copy_into(model.memory);
      }
      if (!vote_.first()) return std::string();
      if (!step) {
        const auto newest = folder_.newest();
        step = newest ? *newest + 1 : 0;
      }
      folder_.begin(*step, loaded, snapshot.writer);
      begun = true;
      return encode_object(*step);
    });
    snapshot.step = decode_object<std::uint64_t>(results.front());
  } catch (...) {
    if (begun) folder_.abandon(*step);
    throw;
  }
}

std::string CheckpointWriter::write_own(const Snapshot& snapshot) {
  Written written;
  const auto write = [&](const std::string& name, const FileBytes& bytes) {
    const CheckpointFile file =
        folder_.write(snapshot.step, name, [&bytes](const ByteSink& sink) { bytes.write(sink); });
    written.emplace_back(file.contents.bytes, file.contents.checksum, bytes.share_bytes());
  };
  const std::uint64_t generation = snapshot.writer.generation;
  if (vote_.first()) write(CheckpointFolder::common_name(generation), snapshot.common);
  write(CheckpointFolder::rank_name(vote_.rank(), generation), snapshot.own);
  for (const auto& [name, model] : snapshot.models) {
    folder_.write(snapshot.step, name,
                  [&bytes = model.bytes](const ByteSink& sink) { bytes.write(sink); });
  }
  return encode_object(written);
}

void CheckpointWriter::commit(const Snapshot& snapshot, const std::vector<std::string>& written,
                              int keep) {
  Manifest manifest{.step = snapshot.step, .files = {}};
  const auto add = [&](std::string name, const Written::value_type& file) {
    const auto& [bytes, checksum, share] = file;
    manifest.files.push_back({std::move(name), {bytes, checksum}, share});
  };
  for (std::size_t r = 0; r < written.size(); ++r) {
    const auto files = decode_object<Written>(written[r]);
    const std::uint64_t generation = snapshot.writer.generation;
    if (r == 0) add(CheckpointFolder::common_name(generation), files.front());
    add(CheckpointFolder::rank_name(static_cast<int>(r), generation), files.back());
  }
  const std::string newer = folder_.commit(manifest, snapshot.loaded);
  if (!newer.empty()) TORCH_WARN("hvd: a newer checkpoint was not removed: ", newer);
  if (keep == 0) return;
  const std::string left = folder_.remove_all_but(static_cast<std::size_t>(keep));
  if (!left.empty()) TORCH_WARN("hvd: an old checkpoint was not removed: ", left);
}

void CheckpointWriter::write(const Snapshot& snapshot, int keep) {
  try {
    const auto written = vote_.run("write", [&] {
      std::string own = write_own(snapshot);
      require_same_ranks(snapshot);
      return own;
    });
    require_same_ranks(snapshot);
    vote_.run("commit", [&] {
      if (vote_.first()) commit(snapshot, written, keep);
      return std::string();
    });
  } catch (const CheckpointError&) {
    if (vote_.first()) folder_.abandon(snapshot.step);
    throw;
  }
}

}  // namespace hvd::libtorch
