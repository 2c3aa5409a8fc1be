#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/durable_file.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/manifest.h"

namespace hvd::libtorch {

/// The checkpoints in a folder, one subfolder per step:
///
///     FOLDER/step-000000000100/common    the replicated state
///                              rank-0    the state of rank 0, and its share of replicated tensors
///                              rank-1
///                              manifest  written last; lists the other files, their sizes and CRCs
///     FOLDER/lock                        while a checkpoint is written: names the writing process
///
/// A step without a manifest is the rest of an interrupted write. Several ranks have an object each
/// for the same folder, which must be on a file system that they share. Not thread-safe.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::filesystem::path path, FileCalls& calls = FileCalls::system())
      : path_(std::move(path)), calls_(calls) {}

  /// The steps of complete checkpoints, ascending; empty if the folder does not exist.
  /// @throws CheckpointError
  std::vector<std::uint64_t> steps() const;
  std::optional<std::uint64_t> newest() const;

  /// Called on one rank before any file of the step is written. Locks the folder until commit() or
  /// abandon(), creates the folders, and removes what an interrupted write of this step has left.
  /// The created names are on the disk when commit() returns.
  /// @param loaded complete checkpoints later than this one are replaced: the one of this step now,
  /// others by commit()
  /// @throws CheckpointError when another process writes in this folder, and when there is a
  /// complete checkpoint of this step or of a later one that is not replaced, since that one would
  /// remain the newest
  void begin(std::uint64_t step, std::optional<std::uint64_t> loaded = std::nullopt);
  /// Writes one file, common_name() or rank_name(). @throws CheckpointError
  Manifest::File write(std::uint64_t step, const std::string& name, const ByteSource& source);
  /// Called on one rank when all files are written. When it returns, the checkpoint is complete and
  /// on the disk, and complete ones later than `loaded` are removed.
  /// @return a warning that names what could not be removed; empty otherwise
  /// @throws CheckpointError when this rank does not see all files
  std::string commit(const Manifest& manifest, std::optional<std::uint64_t> loaded = std::nullopt);
  /// Called on one rank: removes the files of a step that is not to be committed.
  void abandon(std::uint64_t step) noexcept;
  /// Called on one rank: removes all complete checkpoints but the last `keep`, and the rests of
  /// interrupted writes of earlier steps.
  /// @return a warning that names what could not be removed; empty otherwise
  std::string remove_all_but(std::size_t keep) noexcept;

  /// The manifest of a complete checkpoint whose files all have their sizes.
  /// @throws CheckpointError
  Manifest manifest(std::uint64_t step) const;
  /// The bytes of a file. @throws CheckpointError when size or checksum differ from the manifest's
  std::string read(std::uint64_t step, const Manifest::File& file) const;

  std::filesystem::path folder_of(std::uint64_t step) const;
  static std::string common_name();
  static std::string rank_name(int rank);

 private:
  std::vector<std::uint64_t> all_steps() const;
  void require_newest(std::uint64_t step, std::optional<std::uint64_t> loaded) const;
  void check_sizes(const Manifest& manifest) const;
  std::string remove(std::uint64_t step);

  std::filesystem::path path_;
  FileCalls& calls_;
  std::shared_ptr<FolderLock> lock_;  ///< from begin() to commit() or abandon()
};

}  // namespace hvd::libtorch
