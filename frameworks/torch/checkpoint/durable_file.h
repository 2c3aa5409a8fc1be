#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "checkpoint/file_calls.h"

namespace hvd::libtorch {

/// A file's size in bytes and its CRC-32.
struct FileContents {
  std::uint64_t bytes = 0;
  std::uint32_t checksum = 0;
  bool operator==(const FileContents&) const = default;
};

/// Makes `parts`, one behind the other, the contents of `path`. Whoever reads it at any later time,
/// after a crash of the process or of the system too, finds what was there before or all of the
/// new: a temporary file beside it is written, brought to the disk and renamed, and the folder is
/// brought to the disk. After an error the temporary file is gone and `path` as it was, unless the
/// error came from that last step.
/// @throws CheckpointError naming the file and what went wrong.
FileContents write_durably(const std::filesystem::path& path, std::span<const std::string> parts,
                           FileCalls& calls);

/// Creates the folder and those above it that do not exist, durably. @throws CheckpointError.
void make_folder_durably(const std::filesystem::path& folder, FileCalls& calls);

/// Creates one folder, if it does not exist; sync_folder() of the one above it makes it durable.
/// @throws CheckpointError.
void make_folder(const std::filesystem::path& folder, FileCalls& calls);

/// Brings the names in a folder to the disk, where the file system can do that for a folder.
/// @throws CheckpointError.
void sync_folder(const std::filesystem::path& folder, FileCalls& calls);

/// The whole file. @throws CheckpointError when it cannot be read.
std::string read_file(const std::filesystem::path& path);
/// The same, and that it is what was written. @throws CheckpointError when it is not.
std::string read_file(const std::filesystem::path& path, const FileContents& expected);

/// What write_durably() calls its file until it is complete.
inline constexpr const char* kPartial = ".partial";

}  // namespace hvd::libtorch
