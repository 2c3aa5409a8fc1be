#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/durable_file.h"

namespace hvd::libtorch {

/// Identifies a generation of an elastic job.
struct JobGeneration {
  std::string job = {};  ///< a unique name of the job; empty outside elastic jobs
  std::uint64_t generation = 0;

  bool elastic() const noexcept { return !job.empty(); }
  bool operator==(const JobGeneration&) const = default;
};

/// The unique name of this process's job; empty if hvdrun has not started it.
std::string elastic_job_name();
/// The generation of this process.
JobGeneration present_generation();

/// Names the generation that was the last to write to a folder, in the file `generation` there. A
/// process that is cut off from its job belongs to an earlier generation and may not have detected
/// that. Use this class while the folder is locked (FolderLock), so that no other process writes
/// there between claim() and the release of the lock.
class GenerationRecord {
 public:
  explicit GenerationRecord(const std::filesystem::path& folder,
                            FileCalls& calls = FileCalls::system())
      : path_(folder / kName), calls_(calls) {}

  /// nullopt if the file is absent or damaged.
  std::optional<JobGeneration> read() const;
  /// Whether a generation of the same job has written before.
  bool names_job_of(const JobGeneration& own) const;
  /// Records that this generation writes. Has no effect outside elastic jobs.
  /// @throws CheckpointError if a later generation of the job has written
  void claim(const JobGeneration& own);
  /// @throws CheckpointError if a later generation of the job has written since claim(), on a file
  /// system without locks. Has no effect outside elastic jobs
  void check(const JobGeneration& own) const;

  static constexpr const char* kName = "generation";

 private:
  const std::filesystem::path path_;
  FileCalls& calls_;
};

}  // namespace hvd::libtorch
