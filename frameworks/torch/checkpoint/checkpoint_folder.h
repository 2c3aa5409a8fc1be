#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/file_calls.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/manifest.h"

namespace hvd::libtorch {

/// Checkpoints on disk, one folder per step:
///
///     FOLDER/step-000000000100/common    what is the same on every rank
///                              rank-0    what each rank has for itself
///                              rank-1
///                              manifest  written last: names the others, with sizes and checksums
///     FOLDER/lock                         while a checkpoint is written: by which process
///
/// A step without a manifest is what an interrupted write has left. Not thread-safe; several ranks
/// each have one for the same folder, which they must all see.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::filesystem::path path, FileCalls& calls = FileCalls::system())
      : path_(std::move(path)), calls_(calls) {}

  /// The complete ones, ascending. A folder that is not there has none. @throws CheckpointError.
  std::vector<std::uint64_t> steps() const;
  std::optional<std::uint64_t> newest() const;

  /// On one rank, before any file of the step is written. Locks the folder until commit() or
  /// abandon(), creates the folders, and removes what an interrupted write of this step has left.
  /// The created files are on the disk when commit() returns.
  /// @param loaded complete checkpoints later than this one are replaced: the one of this step now,
  /// others by commit()
  /// @throws CheckpointError when another process writes here, and when there is a complete one of
  /// this step or a later one which is not replaced, as "the newest" would no longer mean this one
  void begin(std::uint64_t step, std::optional<std::uint64_t> loaded = std::nullopt);
  Manifest::File write_common(std::uint64_t step, std::span<const std::string> parts);
  Manifest::File write_rank(std::uint64_t step, int rank, std::span<const std::string> parts);
  /// On one rank, after all files: when it returns, the checkpoint is complete, on disk, and
  /// other complete ones later than `loaded` are removed.
  /// @return what could not be removed, for a warning; empty when all went well
  /// @throws CheckpointError when this rank does not see all files.
  std::string commit(const Manifest& manifest, std::optional<std::uint64_t> loaded = std::nullopt);
  /// On one rank: removes what has been written of a step that is not to be committed.
  void abandon(std::uint64_t step) noexcept;
  /// On one rank: removes all complete checkpoints but the last `keep`, and what interrupted writes
  /// of steps before the newest have left.
  /// @return what could not be removed, for a warning; empty when all went well
  std::string remove_all_but(std::size_t keep) noexcept;

  /// Checks that all files have their sizes. @throws CheckpointError.
  Manifest manifest(std::uint64_t step) const;
  /// @throws CheckpointError when it is not as the manifest says.
  std::string read(std::uint64_t step, const Manifest::File& file) const;

  std::filesystem::path folder_of(std::uint64_t step) const;
  static std::string common_name();
  static std::string rank_name(int rank);

 private:
  std::vector<std::uint64_t> all_steps() const;
  void require_newest(std::uint64_t step, std::optional<std::uint64_t> loaded) const;
  Manifest::File write(std::uint64_t step, const std::string& name,
                       std::span<const std::string> parts);
  void check_sizes(const Manifest& manifest) const;
  std::string remove(std::uint64_t step);

  std::filesystem::path path_;
  FileCalls& calls_;
  std::shared_ptr<FolderLock> lock_;  ///< from begin() to commit() or abandon()
};

}  // namespace hvd::libtorch
