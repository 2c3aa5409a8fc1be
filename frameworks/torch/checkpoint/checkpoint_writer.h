#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/rank_talk.h"

namespace hvd::libtorch {

/// What one rank writes of a checkpoint, taken out of the program's hands.
struct Snapshot {
  std::uint64_t step = 0;
  std::vector<std::string> common;  ///< of the first rank
  std::vector<std::string> own;
  std::optional<std::uint64_t> loaded;  ///< complete ones later than this are replaced
  std::string complaint;                ///< why there is none
};

/// One rank's part in writing checkpoints. begin(), take(), write(), in this order, on every
/// rank; write() may be called by another thread. One checkpoint at a time.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::filesystem::path& folder, RankTalk talk)
      : folder_(folder), talk_(std::move(talk)) {}

  /// Agrees on the step and makes its folder. Collective. @param loaded complete checkpoints later
  /// than this one are replaced. @throws as save_checkpoint().
  std::uint64_t begin(const TrainingState& state, std::optional<std::uint64_t> step,
                      std::optional<std::uint64_t> loaded = std::nullopt);
  /// Local; never throws, since the other ranks are about to write. @param snapshot is filled, in
  /// the memory that it has
  void take(const TrainingState& state, std::uint64_t step, Snapshot& snapshot,
            std::optional<std::uint64_t> loaded = std::nullopt) const noexcept;
  /// Collective. @param keep how many stay; 0: all. @throws as save_checkpoint().
  void write(const Snapshot& snapshot, int keep);

 private:
  std::string write_own(const Snapshot& snapshot);
  void commit(const Snapshot& snapshot, const std::vector<std::string>& written, int keep);

  CheckpointFolder folder_;
  RankTalk talk_;
};

}  // namespace hvd::libtorch
