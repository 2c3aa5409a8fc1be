#include "checkpoint/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "checkpoint/checksum.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const fs::path& path) {
  const int number = errno;
  std::string advice;
  if (number == ENOSPC || number == EDQUOT) advice = "; make room or keep fewer checkpoints";
  if (number == ENOENT)
    advice = "; all ranks must see one folder, on a file system that they share";
  throw CheckpointError("cannot " + what + " " + path.string() + ": " +
                        std::generic_category().message(number) + advice);
}

/// Repeats what a signal has interrupted.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// An open file or folder. Move-only in spirit: it stays in one scope.
class OpenFile {
 public:
  OpenFile(const fs::path& path, int flags, FileCalls& calls)
      : path_(path),
        calls_(calls),
        file_(uninterrupted([&] { return calls.open(path.string(), flags | O_CLOEXEC, 0666); })) {
    if (file_ < 0) fail("open", path_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (file_ >= 0) calls_.close(file_);
  }

  void write(std::string_view bytes) {
    constexpr std::size_t kAtOnce = std::size_t{64} << 20;
    while (!bytes.empty()) {
      const auto written = uninterrupted(
          [&] { return calls_.write(file_, bytes.data(), std::min(bytes.size(), kAtOnce)); });
      if (written < 0) fail("write", path_);
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  void sync() {
    if (uninterrupted([&] { return calls_.fsync(file_); }) != 0) fail("bring to the disk", path_);
  }
  /// Some network file systems refuse fsync() of a folder, whose names they keep by themselves.
  void sync_names() {
    if (uninterrupted([&] { return calls_.fsync(file_); }) != 0 && errno != EINVAL &&
        errno != EBADF)
      fail("bring to the disk", path_);
  }
  /// Some file systems say only here that there is no room. Not repeated: the file is closed after
  /// EINTR too.
  void close() {
    if (calls_.close(std::exchange(file_, -1)) != 0 && errno != EINTR) fail("close", path_);
  }

 private:
  const fs::path path_;
  FileCalls& calls_;
  int file_;
};

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

}  // namespace

void sync_folder(const fs::path& folder, FileCalls& calls) {
  OpenFile file(folder, O_RDONLY | O_DIRECTORY, calls);
  file.sync_names();
}

FileContents write_durably(const fs::path& path, std::span<const std::string> parts,
                           FileCalls& calls) {
  const fs::path partial = path.string() + kPartial;
  FileContents contents;
  try {
    OpenFile file(partial, O_WRONLY | O_CREAT | O_TRUNC, calls);
    for (const std::string& part : parts) {
      file.write(part);
      contents.bytes += part.size();
      contents.checksum = crc32(part, contents.checksum);
    }
    file.sync();
    file.close();
    if (calls.rename(partial.string(), path.string()) != 0) fail("rename", partial);
  } catch (...) {
    calls.unlink(partial.string());
    throw;
  }
  sync_folder(folder_of(path), calls);
  return contents;
}

void make_folder(const fs::path& folder, FileCalls& calls) {
  std::error_code error;
  if (calls.mkdir(folder.string(), 0777) != 0 && errno != EEXIST) fail("create the folder", folder);
  if (!fs::is_directory(folder, error)) {
    errno = ENOTDIR;
    fail("use as a folder", folder);
  }
}

void make_folder_durably(const fs::path& folder, FileCalls& calls) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  // "a/b/" has an empty name and the parent "a/b".
  if (folder.has_parent_path() && folder.parent_path() != folder)
    make_folder_durably(folder.parent_path(), calls);
  if (!folder.has_filename()) return;
  make_folder(folder, calls);
  sync_folder(folder_of(folder), calls);
}

std::string read_file(const fs::path& path) {
  const int file = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  if (file < 0) fail("open", path);
  std::error_code error;
  const auto size = fs::file_size(path, error);
  std::string bytes(error ? 0 : size, '\0');
  std::size_t filled = 0;
  ssize_t got = 1;
  while (filled < bytes.size() && got > 0) {
    got = uninterrupted([&] { return ::read(file, bytes.data() + filled, bytes.size() - filled); });
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  const int number = error ? error.value() : errno;
  ::close(file);
  errno = number;
  if (got < 0 || error) fail("read", path);
  bytes.resize(filled);
  return bytes;
}

std::string read_file(const fs::path& path, const FileContents& expected) {
  std::string bytes = read_file(path);
  const std::string who = path.string() + " is damaged: ";
  if (bytes.size() != expected.bytes) {
    throw CheckpointError(who + "expected " + std::to_string(expected.bytes) + " bytes, got " +
                          std::to_string(bytes.size()) + "; load an older checkpoint");
  }
  if (crc32(bytes) != expected.checksum)
    throw CheckpointError(who + "its checksum is wrong; load an older checkpoint");
  return bytes;
}

}  // namespace hvd::libtorch
