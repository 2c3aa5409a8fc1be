#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/durable_file.h"
#include "checkpoint/job_generation.h"

namespace hvd::libtorch {

struct CheckpointFile {
  std::string name;
  FileContents contents;
  /// How many bytes at the end of a rank's file belong to the replicated tensors, which the ranks
  /// write together.
  std::uint64_t share = 0;
  bool operator==(const CheckpointFile&) const = default;
};

/// The list of a checkpoint's files. A checkpoint is complete when its manifest exists; files that
/// no manifest names are ignored.
struct Manifest {
  std::uint64_t step = 0;
  /// The file of the replicated state, then one file per rank, in rank order.
  std::vector<CheckpointFile> files;

  std::size_t ranks() const noexcept { return files.empty() ? 0 : files.size() - 1; }
  const CheckpointFile& common() const { return files.front(); }
  const CheckpointFile& of_rank(std::size_t rank) const { return files[rank + 1]; }

  /// The bytes of replicated tensors in all ranks' files.
  std::uint64_t shared_bytes() const noexcept;

  /// Lines of text; the last line is the checksum of the others. The format version is 1 if no file
  /// has a share, otherwise 2.
  std::string encode() const;
  /// @param where the name of the manifest in error texts
  /// @throws CheckpointError for another version, and when any bit differs from encode()'s output
  static Manifest decode(std::string_view text, const std::string& where);

  bool operator==(const Manifest&) const = default;
};

/// Locks a folder for writing. Only one object of one process, among all jobs, can hold the lock.
///
/// The lock is a file in the folder, locked with flock(), that names the holder. The kernel
/// releases it when the process ends, so the file of a killed process does not block others. On
/// file systems without locks every process succeeds. Not thread-safe.
class FolderLock {
 public:
  /// @param timeout how long to wait for the holder, which in an elastic job may be a process that
  /// was cut off and will be killed
  /// @throws CheckpointError with host, process and job of the holder, or when the folder does not
  /// exist
  explicit FolderLock(const std::filesystem::path& folder,
                      std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  /// Removes the file.
  ~FolderLock();

  static constexpr const char* kName = "lock";

 private:
  enum class Attempt { kLocked, kRemoved, kHeld };
  Attempt try_lock();
  [[noreturn]] void refuse(const std::string& other) const;
  std::string holder() const;

  const std::filesystem::path path_;
  std::string holder_;  ///< the last one that was found
  int file_ = -1;
};

/// The checkpoints in a folder, one subfolder per step:
///
///     FOLDER/step-000000000100/common    the replicated state
///                              rank-0    the state of rank 0, and its share of replicated tensors
///                              rank-1
///                              model.safetensors  a model for Python, if that is requested
///                              manifest  written last; lists common and the ranks' files, with
///                                        their sizes and CRCs
///     FOLDER/lock                        while a checkpoint is written: names the writing process
///
/// In an elastic job the names of common and of the ranks' files end with ".g" and the number of
/// the generation, so that a rank that was cut off cannot write to the files of a later generation.
/// FOLDER/generation names the last generation that has written (GenerationRecord).
///
/// A step without a manifest is left from an interrupted write. Each rank has its own object for
/// the same folder, which must be on a file system that the ranks share. Not thread-safe.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::filesystem::path path, FileCalls& calls = FileCalls::system())
      : path_(std::move(path)), calls_(calls) {}

  /// The steps of complete checkpoints, ascending; empty if the folder does not exist.
  /// @throws CheckpointError
  std::vector<std::uint64_t> steps() const;
  std::optional<std::uint64_t> newest() const;

  /// Called on one rank before any file of the step is written. Locks the folder until commit() or
  /// abandon(), creates the folders, and removes the files that an interrupted write of this step
  /// has left. The created names are on the disk when commit() returns.
  /// @param loaded complete checkpoints of later steps than this are replaced: the one of `step`
  /// now, the others by commit()
  /// @param writer the generation that writes, if the job is elastic
  /// @throws CheckpointError when another process writes in this folder, when a later generation of
  /// this job has written there, and when a complete checkpoint of this or a later step is not
  /// replaced, because it would remain the newest
  void begin(std::uint64_t step, std::optional<std::uint64_t> loaded = std::nullopt,
             const JobGeneration& writer = {});
  /// Writes one file, common_name() or rank_name(). @throws CheckpointError
  CheckpointFile write(std::uint64_t step, const std::string& name, const ByteSource& source);
  /// Called on one rank when all files are written. When it returns, the checkpoint is complete and
  /// on the disk, and complete ones later than `loaded` are removed.
  /// @return a warning that names the files that could not be removed; empty otherwise
  /// @throws CheckpointError when this rank does not see all files
  std::string commit(const Manifest& manifest, std::optional<std::uint64_t> loaded = std::nullopt);
  /// Called on one rank: removes the files of a step that is not to be committed.
  void abandon(std::uint64_t step) noexcept;
  /// Called on one rank: removes all complete checkpoints except the last `keep`, and the files
  /// that interrupted writes of earlier steps have left. @return a warning that names the files
  /// that could not be removed; empty otherwise
  std::string remove_all_but(std::size_t keep) noexcept;

  /// The manifest of a complete checkpoint whose files all have their sizes.
  /// @throws CheckpointError
  Manifest manifest(std::uint64_t step) const;
  /// The bytes of a file. @throws CheckpointError when size or checksum differ from the manifest's
  std::string read(std::uint64_t step, const CheckpointFile& file) const;

  std::filesystem::path folder_of(std::uint64_t step) const;
  /// @param generation of an elastic job; 0 outside one
  static std::string common_name(std::uint64_t generation = 0);
  static std::string rank_name(int rank, std::uint64_t generation = 0);
  /// @param item the name of a model
  static std::string model_name(const std::string& item);

 private:
  std::vector<std::uint64_t> all_steps() const;
  void require_newest(std::uint64_t step, std::optional<std::uint64_t> loaded) const;
  void check_sizes(const Manifest& manifest) const;
  std::string remove(std::uint64_t step);

  std::filesystem::path path_;
  FileCalls& calls_;
  JobGeneration writer_ = {};         ///< since begin()
  std::shared_ptr<FolderLock> lock_;  ///< from begin() to commit() or abandon()
};

}  // namespace hvd::libtorch
