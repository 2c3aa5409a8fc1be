#include "bootstrap/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"

// Note [Files of a store]
// A value gets its name by rename() or link(), so it is complete when it is visible. A number is
// changed in place under the file's lock. Other processes may remove files at any time
// (remove_all_if()), so a writer creates its draft or the folder again if it is missing.
//
// remove_all_if() first lists the folder, then renames the file of its key to a private name and
// checks its value. If the value is unchanged, no later run has begun here, and the listed files
// belong to this run and earlier ones, so they are removed. If it has another value, the file is
// put back.

namespace hvd::rendezvous {
namespace {

namespace fs = std::filesystem;

/// Flags for every file, so that a FIFO, a link or a device at its name does no harm.
constexpr int kSafely = O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;

[[noreturn]] void fail_with(const char* what, const std::string& path, int error) {
  throw Error(text("hvd::init: cannot ", what, " ", path, ": ", std::strerror(error),
                   "; init_method needs a file in a folder that every rank can write to"));
}

/// Owns a descriptor.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int operator*() const { return descriptor_; }
  bool opened() const { return descriptor_ >= 0; }
  int close() { return ::close(std::exchange(descriptor_, -1)); }

 private:
  int descriptor_;
};

std::string kind_of(const struct stat& info) {
  if (S_ISFIFO(info.st_mode)) return "a FIFO";
  if (S_ISLNK(info.st_mode)) return "a symbolic link";
  if (S_ISDIR(info.st_mode)) return "a folder";
  if (S_ISSOCK(info.st_mode)) return "a socket";
  if (!S_ISREG(info.st_mode)) return "a device";
  return text("a file of user ", info.st_uid);
}

[[noreturn]] void refuse(const std::string& path, const std::string& expected,
                         const std::string& found) {
  throw UsageError(text("hvd::init: ", path, ": expected ", expected, ", got ", found,
                        "; give the job its own path, which no other user and no other program "
                        "uses"));
}

bool is_own_file(const struct stat& info) {
  return S_ISREG(info.st_mode) && info.st_uid == ::geteuid();
}

void check_file(int file, const std::string& path) {
  struct stat info = {};
  if (::fstat(file, &info) != 0) fail_with("read", path, errno);
  if (!is_own_file(info)) refuse(path, "a regular file of this user", kind_of(info));
  if (static_cast<std::size_t>(info.st_size) > kMaxValueBytes)
    refuse(path, text("a file of at most ", kMaxValueBytes, " bytes"),
           text(info.st_size, " bytes"));
}

/// Empty if there is no such file.
std::optional<Bytes> read_all(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | kSafely));
  // NFS returns ESTALE for a file that has just been replaced.
  if (!file.opened() && (errno == ENOENT || errno == ESTALE)) return std::nullopt;
  if (!file.opened() && errno == ELOOP) refuse(path, "a regular file", "a symbolic link");
  if (!file.opened()) fail_with("read", path, errno);
  check_file(*file, path);
  Bytes bytes;
  while (bytes.size() <= kMaxValueBytes) {
    std::byte part[16384];
    const ssize_t got = ::read(*file, part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == ESTALE) return std::nullopt;
    if (got < 0) fail_with("read", path, errno);
    if (got == 0) return bytes;
    bytes.insert(bytes.end(), part, part + got);
  }
  refuse(path, text("a file of at most ", kMaxValueBytes, " bytes"), "more");
}

/// The name of a file for a key. Reversible, so that different keys have different names.
std::string escaped(const std::string& key) {
  std::string name;
  for (const char letter : key) {
    const bool plain = std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '-' ||
                       letter == '_' || (letter == '.' && !name.empty());
    if (plain) {
      name += letter;
    } else {
      char hex[4];
      std::snprintf(hex, sizeof hex, "%%%02x", static_cast<unsigned char>(letter));
      name += hex;
    }
  }
  return name.empty() ? "%" : name;
}

std::string folder_of(const std::string& path, const std::string& job) {
  return job.empty() ? path + ".hvd" : path + "." + short_name(escaped(job)) + ".hvd";
}

class FileStore final : public Store {
 public:
  FileStore(const std::string& path, const std::string& job)
      : url_("file://" + path),
        folder_(folder_of(path, job)),
        draft_(file("draft." + random_id())) {
    struct stat info = {};
    if (::lstat(path.c_str(), &info) == 0) {
      if (!is_own_file(info)) refuse(path, "a regular file of this user", kind_of(info));
    } else if (errno != ENOENT) {
      fail_with("use", path, errno);
    }
    make_folder();
  }

  const std::string& url() const noexcept override { return url_; }
  void set(const std::string& key, std::span<const std::byte> value, Deadline) override;
  std::optional<Bytes> get(const std::string& key, Deadline) override {
    return read_all(file(escaped(key)));
  }
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline) override;
  bool create(const std::string& key, std::span<const std::byte> value, Deadline) override;
  void remove_all_if(const std::string& key, std::span<const std::byte> value, Deadline) override;
  void close(Deadline) noexcept override { ::rmdir(folder_.c_str()); }  // if it is empty

 private:
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  void make_folder() const;
  void write_draft(std::span<const std::byte>) const;
  std::optional<std::int64_t> try_to_add(const std::string& path, std::int64_t amount,
                                         Deadline) const;

  const std::string url_;
  const std::string folder_;
  const std::string draft_;  ///< a name that only this object uses
};

/// Makes the folder, or checks the one that is there.
void FileStore::make_folder() const {
  if (::mkdir(folder_.c_str(), 0700) == 0) return;
  if (errno != EEXIST) fail_with("make", folder_, errno);
  struct stat info = {};
  if (::lstat(folder_.c_str(), &info) != 0) return;  // another rank has just removed it
  if (!S_ISDIR(info.st_mode)) refuse(folder_, "a folder", kind_of(info));
  if (info.st_uid == ::geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0) return;
  refuse(folder_, "a folder that only this user can write to",
         text("a folder of user ", info.st_uid, " with other access"));
}

void FileStore::write_draft(std::span<const std::byte> value) const {
  int made = -1;
  while ((made = ::open(draft_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | kSafely, 0600)) < 0) {
    if (errno != ENOENT) fail_with("write", draft_, errno);
    make_folder();
  }
  File draft(made);
  while (!value.empty()) {
    const ssize_t written = ::write(*draft, value.data(), value.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      ::unlink(draft_.c_str());
      fail_with("write", draft_, error);
    }
    value = value.subspan(static_cast<std::size_t>(written));
  }
  if (draft.close() != 0) fail_with("write", draft_, errno);
}

void FileStore::set(const std::string& key, std::span<const std::byte> value, Deadline deadline) {
  const std::string path = file(escaped(key));
  do {
    write_draft(value);
    if (::rename(draft_.c_str(), path.c_str()) == 0) return;
  } while (errno == ENOENT && std::chrono::steady_clock::now() < deadline);
  const int error = errno;
  ::unlink(draft_.c_str());
  if (error == EISDIR) refuse(path, "a regular file", "a folder");
  fail_with("write", path, error);
}

bool FileStore::create(const std::string& key, std::span<const std::byte> value,
                       Deadline deadline) {
  const std::string path = file(escaped(key));
  int error = 0;
  do {
    write_draft(value);
    error = ::link(draft_.c_str(), path.c_str()) == 0 ? 0 : errno;
    struct stat info = {};
    // A file system on a network may lose the reply to a link() that it has made.
    if (error != 0 && ::lstat(draft_.c_str(), &info) == 0 && info.st_nlink == 2) error = 0;
    ::unlink(draft_.c_str());
  } while (error == ENOENT && std::chrono::steady_clock::now() < deadline);
  if (error != 0 && error != EEXIST) fail_with("write", path, error);
  return error == 0;
}

/// Empty if another process has removed the file meanwhile.
std::optional<std::int64_t> FileStore::try_to_add(const std::string& path, std::int64_t amount,
                                                  Deadline deadline) const {
  const File number(::open(path.c_str(), O_RDWR | O_CREAT | kSafely, 0600));
  if (!number.opened() && errno == ENOENT) {
    make_folder();
    return std::nullopt;
  }
  if (!number.opened() && errno == ELOOP) refuse(path, "a regular file", "a symbolic link");
  if (!number.opened()) fail_with("write", path, errno);
  check_file(*number, path);
  auto pause = std::chrono::microseconds(50);
  while (::flock(*number, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) fail_with("lock", path, errno);
    if (std::chrono::steady_clock::now() >= deadline) {
      throw Error(text("hvd::init: another process holds the lock of ", path,
                       " and has not released it in time; see which rank is stopped"));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20'000));
  }
  struct stat info = {};
  if (::fstat(*number, &info) != 0) fail_with("read", path, errno);
  if (info.st_nlink == 0) return std::nullopt;
  std::int64_t sum = 0;
  const ssize_t got = ::pread(*number, &sum, sizeof sum, 0);
  if (got < 0) fail_with("read", path, errno);
  if (got != 0 && got != sizeof sum) refuse(path, "a number", text(got, " bytes"));
  sum += amount;
  if (amount != 0 && ::pwrite(*number, &sum, sizeof sum, 0) != sizeof sum)
    fail_with("write", path, errno);
  return sum;
}

std::int64_t FileStore::add(const std::string& key, std::int64_t amount, Deadline deadline) {
  const std::string path = file(escaped(key));
  for (;;)
    if (const auto sum = try_to_add(path, amount, deadline)) return *sum;
}

void FileStore::remove_all_if(const std::string& key, std::span<const std::byte> value, Deadline) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator each(folder_, error), end; !error && each != end;
       each.increment(error))
    files.push_back(each->path());
  const std::string path = file(escaped(key));
  if (::rename(path.c_str(), draft_.c_str()) != 0) return;
  const auto found = read_all(draft_);
  const bool same = found && std::equal(found->begin(), found->end(), value.begin(), value.end());
  if (!same) static_cast<void>(::link(draft_.c_str(), path.c_str()));
  ::unlink(draft_.c_str());
  if (!same) return;
  for (const fs::path& each : files) ::unlink(each.c_str());
  ::rmdir(folder_.c_str());
}

}  // namespace

std::unique_ptr<Store> open_file_store(const std::string& path, const std::string& job) {
  return std::make_unique<FileStore>(path, job);
}

}  // namespace hvd::rendezvous
