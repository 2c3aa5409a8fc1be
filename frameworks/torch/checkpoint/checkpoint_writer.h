#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_vote.h"
#include "checkpoint/state_file.h"

namespace hvd::libtorch {

/// A model in a file that Python reads.
struct ModelFile {
  FileBytes bytes;
  std::string memory;  ///< holds a copy; kept for the next checkpoint
};

/// The files that one rank writes for a checkpoint. Must not be copied or moved while it holds
/// copies of tensors, because it points to its own members then.
struct Snapshot {
  std::uint64_t step = 0;
  JobGeneration writer = {};            ///< the generation in which it was taken
  std::optional<std::uint64_t> loaded;  ///< complete checkpoints later than this are replaced
  FileBytes common;                     ///< only on the first rank
  FileBytes own;
  std::map<std::string, ModelFile> models;  ///< by the file's name; only on the first rank
  std::string common_memory, own_memory;    ///< holds the copies; kept for the next checkpoint

  void free_memory();
};

/// One rank's part in writing checkpoints: take_snapshot(), then write(), on every rank. write()
/// may run in another thread. One checkpoint at a time.
class CheckpointWriter {
 public:
  /// @param safetensors also writes each model to a separate file
  CheckpointWriter(const std::filesystem::path& folder, CheckpointVote vote, bool safetensors)
      : folder_(folder), vote_(std::move(vote)), safetensors_(safetensors) {}

  /// Agrees on the step and on the files' contents, and makes the step's folder. Collective.
  /// @param snapshot filled in. It borrows the state's tensors, which must not change until it is
  /// written, unless `copy` is set. @param copy whether to copy the tensors
  /// @throws as save_checkpoint()
  void take_snapshot(const TrainingState& state, std::optional<std::uint64_t> step,
                     std::optional<std::uint64_t> loaded, bool copy, Snapshot& snapshot);
  /// Writes the files, and then the manifest. Collective.
  /// @param keep how many complete checkpoints remain; 0: all. @throws as save_checkpoint()
  void write(const Snapshot& snapshot, int keep);

 private:
  /// Encodes what the ranks have in common and compares it. Collective.
  /// @return the number of ranks that each write a part of the replicated tensors; 0: they differ
  /// between ranks or are small, and the first rank writes all of its own
  std::size_t encode_common(const TrainingState& state, const std::string& description,
                            std::vector<TensorText>& common);
  std::string write_own(const Snapshot& snapshot);
  void commit(const Snapshot& snapshot, const std::vector<std::string>& written, int keep);

  CheckpointFolder folder_;
  CheckpointVote vote_;
  bool safetensors_;
};

}  // namespace hvd::libtorch
