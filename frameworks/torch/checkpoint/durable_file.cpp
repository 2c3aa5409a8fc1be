#include "checkpoint/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

constexpr std::size_t kSlices = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

/// tables[k][b]: the contribution of byte b when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320U : 0);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < kSlices; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t one_byte(std::uint32_t value, char byte) {
  return (value >> 8) ^ kTables[0][(value ^ static_cast<unsigned char>(byte)) & 0xFF];
}

}  // namespace

// Uses the algorithm "slicing by 8", because a checkpoint may have gigabytes.
std::uint32_t crc32(std::string_view bytes, std::uint32_t before) noexcept {
  static_assert(std::endian::native == std::endian::little);
  std::uint32_t value = ~before;
  while (bytes.size() >= kSlices) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    word ^= value;
    value = 0;
    for (std::size_t k = 0; k < kSlices; ++k)
      value ^= kTables[kSlices - 1 - k][(word >> (8 * k)) & 0xFF];
    bytes.remove_prefix(kSlices);
  }
  for (const char byte : bytes) value = one_byte(value, byte);
  return ~value;
}

int FileCalls::open(const std::string& path, int flags, mode_t mode) {
  return ::open(path.c_str(), flags, mode);
}
ssize_t FileCalls::read(int file, void* data, std::size_t bytes) {
  return ::read(file, data, bytes);
}
ssize_t FileCalls::write(int file, const void* data, std::size_t bytes) {
  return ::write(file, data, bytes);
}
int FileCalls::fsync(int file) { return ::fsync(file); }
int FileCalls::close(int file) { return ::close(file); }
int FileCalls::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}
int FileCalls::mkdir(const std::string& path, mode_t mode) { return ::mkdir(path.c_str(), mode); }
int FileCalls::unlink(const std::string& path) { return ::unlink(path.c_str()); }
int FileCalls::rmdir(const std::string& path) { return ::rmdir(path.c_str()); }

FileCalls& FileCalls::system() {
  static FileCalls calls;
  return calls;
}

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

/// Repeats a call that a signal has interrupted.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// An open file or folder, closed at the end of the scope.
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
  /// @return 0 at the end of the file
  std::size_t read(char* data, std::size_t bytes) {
    const auto got = uninterrupted([&] { return calls_.read(file_, data, bytes); });
    if (got < 0) fail("read", path_);
    return static_cast<std::size_t>(got);
  }
  void sync() {
    if (uninterrupted([&] { return calls_.fsync(file_); }) != 0) fail("bring to the disk", path_);
  }
  /// Ignores the errors of network file systems that refuse fsync() of a folder, because they store
  /// its names durably by themselves.
  void sync_names() {
    if (uninterrupted([&] { return calls_.fsync(file_); }) != 0 && errno != EINVAL &&
        errno != EBADF)
      fail("bring to the disk", path_);
  }
  /// Some file systems report a full disk only here. The call is not repeated after EINTR, because
  /// the file is then closed too.
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

FileContents write_durably(const fs::path& path, const ByteSource& source, FileCalls& calls,
                           const DurableFileOptions& options) {
  const fs::path partial = path.string() + kPartial;
  FileContents contents;
  try {
    OpenFile file(partial, O_WRONLY | O_CREAT | O_TRUNC, calls);
    source([&](std::string_view bytes) {
      file.write(bytes);
      contents.bytes += bytes.size();
      if (options.checksum) contents.checksum = crc32(bytes, contents.checksum);
    });
    if (options.sync) file.sync();
    file.close();
    if (calls.rename(partial.string(), path.string()) != 0) fail("rename", partial);
  } catch (...) {
    calls.unlink(partial.string());
    throw;
  }
  if (options.sync) sync_folder(folder_of(path), calls);
  return contents;
}

FileContents write_durably(const fs::path& path, std::string_view bytes, FileCalls& calls) {
  return write_durably(path, [bytes](const ByteSink& sink) { sink(bytes); }, calls);
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
  // The path "a/b/" has an empty name and the parent "a/b".
  if (folder.has_parent_path() && folder.parent_path() != folder)
    make_folder_durably(folder.parent_path(), calls);
  if (!folder.has_filename()) return;
  make_folder(folder, calls);
  sync_folder(folder_of(folder), calls);
}

std::string read_file(const fs::path& path, FileCalls& calls) {
  OpenFile file(path, O_RDONLY, calls);
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error) {
    errno = error.value();
    fail("read", path);
  }
  std::string bytes(size, '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const std::size_t got = file.read(bytes.data() + filled, bytes.size() - filled);
    if (got == 0) break;
    filled += got;
  }
  bytes.resize(filled);
  return bytes;
}

std::string read_file(const fs::path& path, const FileContents& expected, FileCalls& calls) {
  std::string bytes = read_file(path, calls);
  const std::string who = path.string() + " is damaged: ";
  if (bytes.size() != expected.bytes) {
    throw CheckpointError(text(who, "expected ", expected.bytes, " bytes, got ", bytes.size(),
                               "; load an older checkpoint"));
  }
  if (crc32(bytes) != expected.checksum)
    throw CheckpointError(who + "its checksum is wrong; load an older checkpoint");
  return bytes;
}

}  // namespace hvd::libtorch
