#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_vote.h"
#include "checkpoint/state_file.h"

namespace hvd::libtorch {

/// One rank's part in loading one checkpoint. Each file is opened and read by one rank, which sends
/// it to the ranks that need it. Not thread-safe.
class CheckpointReader {
 public:
  CheckpointReader(const std::filesystem::path& folder, CheckpointVote vote,
                   FileCalls& calls = FileCalls::system())
      : folder_(folder, calls), vote_(std::move(vote)) {}

  /// Collective. @return the step; nullopt when there is no checkpoint. @throws as
  /// load_checkpoint()
  std::optional<std::uint64_t> load(const TrainingState& state, std::optional<std::uint64_t> step,
                                    bool allow_unused);

 private:
  using Changes = std::vector<std::function<void()>>;
  /// Which bytes of the ranks' own state are sent to other ranks.
  enum class Send : char { kNone, kToNewRanks, kAll };

  std::optional<Manifest> choose(std::optional<std::uint64_t> step);
  Send send_needed(const TrainingState& state, const Manifest& manifest,
                   std::string_view own) const;
  void read_ranks(const TrainingState& state, const Manifest& manifest);
  std::function<void()> decode_shards(const TrainingState::Entry& entry) const;
  std::function<void()> decode_entry(const TrainingState::Entry& entry, bool is_new) const;
  Changes decode(const TrainingState& state, bool allow_unused) const;

  CheckpointFolder folder_;
  CheckpointVote vote_;
  std::string common_;
  /// The own state of each rank of the checkpoint; empty if this rank does not need it.
  std::vector<std::string> own_;
};

}  // namespace hvd::libtorch
