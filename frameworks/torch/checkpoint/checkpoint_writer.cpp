#include "checkpoint/checkpoint_writer.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "checkpoint/state_file.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {
namespace {

/// Size and checksum of each file that a rank has written.
using Written = std::vector<std::pair<std::uint64_t, std::uint32_t>>;

}  // namespace

std::uint64_t CheckpointWriter::begin(const TrainingState& state, std::optional<std::uint64_t> step,
                                      std::optional<std::uint64_t> loaded) {
  // A state that cannot be saved together leaves no folder behind.
  const std::string own =
      description_of(state, /*with_contents=*/true) + " for " +
      (step ? "step " + std::to_string(*step) : "the step after the newest") +
      (loaded ? ", replacing what is newer than step " + std::to_string(*loaded) : std::string());
  require_equal(talk_.after("state", [&] { return own; }), talk_.process_set(), "save_checkpoint");
  const auto said = talk_.after("begin", [&] {
    if (!talk_.first()) return std::string();
    if (!step) {
      const auto newest = folder_.newest();
      step = newest ? *newest + 1 : 0;
    }
    folder_.begin(*step, loaded);
    return encode_object(*step);
  });
  return decode_object<std::uint64_t>(said.front());
}

void CheckpointWriter::take(const TrainingState& state, std::uint64_t step, Snapshot& snapshot,
                            std::optional<std::uint64_t> loaded) const noexcept {
  snapshot.step = step;
  snapshot.loaded = loaded;
  snapshot.complaint.clear();
  try {
    if (talk_.first()) encode_items(state, Share::kCommon, snapshot.common);
    encode_items(state, Share::kOfRank, snapshot.own);
  } catch (const c10::Error& error) {
    snapshot.complaint = error.what_without_backtrace();
  } catch (const std::exception& error) {
    snapshot.complaint = error.what();
  }
}

std::string CheckpointWriter::write_own(const Snapshot& snapshot) {
  if (!snapshot.complaint.empty()) throw CheckpointError(snapshot.complaint);
  Written written;
  const auto add = [&](const Manifest::File& file) {
    written.emplace_back(file.contents.bytes, file.contents.checksum);
  };
  if (talk_.first()) add(folder_.write_common(snapshot.step, snapshot.common));
  add(folder_.write_rank(snapshot.step, talk_.rank(), snapshot.own));
  return encode_object(written);
}

void CheckpointWriter::commit(const Snapshot& snapshot, const std::vector<std::string>& written,
                              int keep) {
  Manifest manifest{.step = snapshot.step, .files = {}};
  const auto add = [&](std::string name, const Written::value_type& file) {
    manifest.files.push_back({std::move(name), {file.first, file.second}});
  };
  for (std::size_t r = 0; r < written.size(); ++r) {
    const auto files = decode_object<Written>(written[r]);
    if (r == 0) add(CheckpointFolder::common_name(), files.front());
    add(CheckpointFolder::rank_name(static_cast<int>(r)), files.back());
  }
  const std::string newer = folder_.commit(manifest, snapshot.loaded);
  if (!newer.empty()) TORCH_WARN("hvd: a newer checkpoint that is replaced stays: ", newer);
  if (keep == 0) return;
  const std::string left = folder_.remove_all_but(static_cast<std::size_t>(keep));
  if (!left.empty()) TORCH_WARN("hvd: an old checkpoint stays: ", left);
}

void CheckpointWriter::write(const Snapshot& snapshot, int keep) {
  try {
    const auto written = talk_.after("write", [&] { return write_own(snapshot); });
    talk_.after("commit", [&] {
      if (talk_.first()) commit(snapshot, written, keep);
      return std::string();
    });
  } catch (const CheckpointError&) {
    if (talk_.first()) folder_.abandon(snapshot.step);
    throw;
  }
}

}  // namespace hvd::libtorch
