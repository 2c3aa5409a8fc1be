#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace hvd::libtorch {

/// CRC-32 as in zlib, gzip and PNG. @param before the checksum of the bytes that precede these; 0
/// at the beginning
std::uint32_t crc32(std::string_view bytes, std::uint32_t before = 0) noexcept;

/// The system calls that a checkpoint makes. Tests replace them to count them, to make them fail,
/// or to kill the process before a call. Results and errno are those of the system. Thread-safe.
class FileCalls {
 public:
  virtual ~FileCalls() = default;

  virtual int open(const std::string& path, int flags, mode_t mode);
  virtual ssize_t read(int file, void* data, std::size_t bytes);
  virtual ssize_t write(int file, const void* data, std::size_t bytes);
  virtual int fsync(int file);
  virtual int close(int file);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int mkdir(const std::string& path, mode_t mode);
  virtual int unlink(const std::string& path);
  virtual int rmdir(const std::string& path);

  /// Makes the calls without any change.
  static FileCalls& system();
};

/// A file's size in bytes and its CRC-32.
struct FileContents {
  std::uint64_t bytes = 0;
  std::uint32_t checksum = 0;
  bool operator==(const FileContents&) const = default;
};

using ByteSink = std::function<void(std::string_view)>;
/// Passes a file's bytes to the sink, in order and in parts of any size.
using ByteSource = std::function<void(const ByteSink&)>;

struct DurableFileOptions {
  /// Computes FileContents::checksum, which takes about as long as the copy to the page cache.
  bool checksum = true;
  /// false: the file survives a crash of the process, but not of the system.
  bool sync = true;
};

/// Replaces `path` by a file with the source's bytes. A reader finds the old file or the complete
/// new one, even after a crash of the process or of the system. The bytes are written to a
/// temporary file beside it, which is synced and renamed. Then the folder is synced. After an error
/// the temporary file is removed and `path` is unchanged, unless syncing the folder has failed.
/// @throws CheckpointError that names the file and the failed call; exceptions of the source
FileContents write_durably(const std::filesystem::path& path, const ByteSource& source,
                           FileCalls& calls, const DurableFileOptions& options = {});
/// The same for one string.
FileContents write_durably(const std::filesystem::path& path, std::string_view bytes,
                           FileCalls& calls);

/// Creates the folder and its missing parents, durably. @throws CheckpointError
void make_folder_durably(const std::filesystem::path& folder, FileCalls& calls);

/// Creates one folder if it does not exist. It is durable after sync_folder() of its parent.
/// @throws CheckpointError
void make_folder(const std::filesystem::path& folder, FileCalls& calls);

/// Syncs the names in a folder to the disk. No effect on file systems that cannot sync folders.
/// @throws CheckpointError
void sync_folder(const std::filesystem::path& folder, FileCalls& calls);

/// The bytes of a file. @throws CheckpointError when it cannot be read
std::string read_file(const std::filesystem::path& path, FileCalls& calls = FileCalls::system());
/// The same. @throws CheckpointError also when size or checksum differ from `expected`
std::string read_file(const std::filesystem::path& path, const FileContents& expected,
                      FileCalls& calls = FileCalls::system());

/// The suffix of the temporary file of write_durably().
inline constexpr const char* kPartial = ".partial";

}  // namespace hvd::libtorch
