#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/rank_talk.h"
#include "checkpoint/state_file.h"

namespace hvd::libtorch {

/// One rank's part in loading one checkpoint. Not thread-safe.
class CheckpointReader {
 public:
  CheckpointReader(const std::filesystem::path& folder, RankTalk talk)
      : folder_(folder), talk_(std::move(talk)) {}

  /// Collective. @return the step; nullopt when there is none. @throws as load_checkpoint().
  std::optional<std::uint64_t> load(const TrainingState& state, std::optional<std::uint64_t> step,
                                    bool allow_unused);

 private:
  using Changes = std::vector<std::function<void()>>;

  std::optional<Manifest> choose(std::optional<std::uint64_t> step);
  std::string read_own(const Manifest& manifest) const;
  std::function<void()> decode_shards(const TrainingState::Entry& entry,
                                      const Manifest& manifest) const;
  Changes decode(const TrainingState& state, const Manifest& manifest, bool allow_unused) const;

  CheckpointFolder folder_;
  RankTalk talk_;
  std::string common_;
};

}  // namespace hvd::libtorch
