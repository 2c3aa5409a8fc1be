#include "base/shared_segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd {
namespace {

[[noreturn]] void fail(const std::string& action, const std::string& name, int error) {
  throw Error(text("shared memory ", name, ": ", action, " failed: ", std::strerror(error),
                   "; see that /dev/shm is mounted, writable and has room (docker: --shm-size)"));
}

/// Owns a descriptor and closes it. A mapping of the file stays.
class OwnedDescriptor {
 public:
  explicit OwnedDescriptor(int descriptor) : descriptor_(descriptor) {}
  OwnedDescriptor(OwnedDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~OwnedDescriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const noexcept { return descriptor_; }
  int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::byte* map(int descriptor, std::size_t bytes, const std::string& name) {
  const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (memory == MAP_FAILED) fail(text("mmap of ", bytes, " bytes"), name, errno);
  return static_cast<std::byte*>(memory);
}

std::string path_of(const std::string& name) { return "/dev/shm" + name; }

/// Opens the memfd to which the link of that name points; errno is ENOENT if there is no link.
/// @throws hvd::Error when the link points to another file
OwnedDescriptor open_nameless(const std::string& name) {
  OwnedDescriptor file(::open(path_of(name).c_str(), O_RDWR | O_CLOEXEC));
  const int error = errno;
  char link[PATH_MAX];
  if (file.get() < 0 && error == ENOENT &&
      ::readlink(path_of(name).c_str(), link, sizeof link) < 0) {
    errno = ENOENT;
    return file;
  }
  if (file.get() < 0) fail("open of its maker's memory", name, error);
  const std::string self = text("/proc/self/fd/", file.get());
  const ssize_t length = ::readlink(self.c_str(), link, sizeof link);
  const bool ours = length > 0 && std::string_view(link, static_cast<std::size_t>(length)) ==
                                      "/memfd:" + name + " (deleted)";
  if (!ours) fail("finding its maker's memory", name, ENXIO);
  return file;
}

constexpr std::string_view kOwner = ".owner";

/// Makes an empty file of this name, locked by this process. It may still lack its name; see
/// give_name(). Returns an invalid file, with the reason in errno, if the name exists or the file
/// cannot be made.
OwnedDescriptor make_locked(const std::string& name) {
  const bool can_name_it = ::access("/proc/self/fd", F_OK) == 0;
  OwnedDescriptor file(can_name_it ? ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) : -1);
  if (file.get() < 0)
    file = OwnedDescriptor(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  // Only a process that looks for abandoned files can hold the lock, and such a process releases it
  // soon.
  while (file.get() >= 0 && ::flock(file.get(), LOCK_SH) != 0 && errno == EINTR) {
  }
  return file;
}

bool has_name(int file) {
  struct stat info = {};
  return ::fstat(file, &info) == 0 && info.st_nlink > 0;
}

/// Returns false, with the reason in errno, on failure.
bool give_name(int file, const std::string& name) {
  if (has_name(file)) return true;
  const std::string self = text("/proc/self/fd/", file);
  return ::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path_of(name).c_str(), AT_SYMLINK_FOLLOW) == 0;
}

void remove_if_abandoned(const std::filesystem::path& path) {
  // O_NONBLOCK, in case the name is a pipe.
  const OwnedDescriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_uid != ::geteuid() || info.st_size == 0 ||
      ::flock(file.get(), LOCK_EX | LOCK_NB) != 0)
    return;
  std::string link = path;
  if (link.ends_with(kOwner)) {
    link.resize(link.size() - kOwner.size());
    ::unlink(link.c_str());
  }
  ::unlink(path.c_str());
}

}  // namespace

// Before Linux 6.11 a signal interrupts the call without any effect. The call is therefore
// repeated, for pieces small enough to complete between two ticks of a profiler's timer.
int reserve_pages(int descriptor, std::size_t begin, std::size_t size) noexcept {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  for (std::size_t done = 0; done < size; done += kPiece) {
    int error = EINTR;
    while (error == EINTR) {
      error = ::posix_fallocate(descriptor, static_cast<off_t>(begin + done),
                                static_cast<off_t>(std::min(kPiece, size - done)));
    }
    if (error != 0) return error;
  }
  return 0;
}

// Note [Abandoned segment files]
// A killed maker cannot remove the name. The maker therefore holds a lock (flock) on the file for
// as long as the file has a name. The kernel releases the lock when the process ends; if another
// process can then acquire the lock, the name is no longer needed. Process ids are not used,
// because they differ between pid namespaces.
//
// The file is made without a name and linked once its lock is held and its pages are allocated.
// Where that is impossible (/dev/shm is not a tmpfs, or there is no /proc) the file has its name
// first and is locked while it is empty; so remove_abandoned() keeps empty files.
//
// A symbolic link cannot be locked. Its maker locks a file of one byte beside it, made before the
// link and removed after it.

void SharedSegment::remove_abandoned(const std::filesystem::path& folder) noexcept {
  try {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().filename().string().starts_with(kPrefix.substr(1)))
        remove_if_abandoned(entry.path());
    }
  } catch (const std::exception&) {
    // A later call removes the remaining files.
  }
}

std::unique_ptr<SharedSegment> SharedSegment::create(const std::string& name, std::size_t bytes) {
  OwnedDescriptor file = make_locked(name);
  if (file.get() < 0) fail("making it", name, errno);
  const bool named = has_name(file.get());
  const int reserved = reserve_pages(file.get(), 0, bytes);
  if (reserved == ENOSPC) {
    if (named) ::shm_unlink(name.c_str());
    if (auto segment = create_without_room(name, bytes)) return segment;
  }
  std::unique_ptr<SharedSegment> segment;
  try {
    if (reserved != 0) fail(text("reserving ", bytes, " bytes"), name, reserved);
    segment.reset(new SharedSegment({}, map(file.get(), bytes, name), bytes));
    if (!give_name(file.get(), name)) fail("naming it", name, errno);
  } catch (...) {
    if (named) ::shm_unlink(name.c_str());
    throw;
  }
  segment->name_ = name;
  segment->lock_ = file.release();
  return segment;
}

// Note [No room in /dev/shm]
// /dev/shm of a container has 64 MiB by default, and other programs may fill it while a job runs.
// In that case the pages come from a memfd, which takes no space in any file system, and the name
// is a symbolic link to /proc/PID/fd/N. tmpfs stores such a short link in the inode, so it needs no
// space. The descriptor stays open while the segment lives. A process that follows the link checks
// that it points to a memfd of this name, because in another pid namespace the link may point
// elsewhere.

bool SharedSegment::needs_no_room() noexcept {
  const OwnedDescriptor file(::memfd_create("hvd-probe", MFD_CLOEXEC));
  return file.get() >= 0;
}

/// Returns null if there is no memory for a memfd either.
std::unique_ptr<SharedSegment> SharedSegment::create_without_room(const std::string& name,
                                                                  std::size_t bytes) {
  OwnedDescriptor memory(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (memory.get() < 0 || reserve_pages(memory.get(), 0, bytes) != 0) return nullptr;
  std::unique_ptr<SharedSegment> segment(
      new SharedSegment({}, map(memory.get(), bytes, name), bytes));
  const std::string beside = name + std::string(kOwner);
  OwnedDescriptor owner = make_locked(beside);
  if (owner.get() < 0 || ::ftruncate(owner.get(), 1) != 0 || !give_name(owner.get(), beside))
    fail("naming its maker", name, errno);
  segment->name_ = name;
  segment->lock_ = owner.release();
  segment->nameless_ = memory.release();
  const std::string target = text("/proc/", ::getpid(), "/fd/", segment->nameless_);
  if (::symlink(target.c_str(), path_of(name).c_str()) != 0) fail("symlink", name, errno);
  return segment;
}

std::unique_ptr<SharedSegment> SharedSegment::attach(const std::string& name, std::size_t bytes) {
  OwnedDescriptor file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0 && errno == ELOOP) file = open_nameless(name);  // shm_open() follows no link
  if (file.get() < 0 && errno == ENOENT) return nullptr;
  if (file.get() < 0) fail("shm_open", name, errno);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail("fstat", name, errno);
  if (static_cast<std::size_t>(info.st_size) != bytes)
    return nullptr;  // the maker is still reserving pages
  return std::unique_ptr<SharedSegment>(
      new SharedSegment(name, map(file.get(), bytes, name), bytes));
}

std::unique_ptr<SharedSegment> SharedSegment::unshared(std::size_t bytes) {
  return std::unique_ptr<SharedSegment>(new SharedSegment({}, map(-1, bytes, "(private)"), bytes));
}

SharedSegment::~SharedSegment() {
  unlink();
  ::munmap(data_, bytes_);
  if (nameless_ >= 0) ::close(nameless_);
}

void SharedSegment::unlink() noexcept {
  if (name_.empty()) return;
  // ENOENT is expected: every process removes the name, so that it disappears even if its maker is
  // killed.
  ::shm_unlink(name_.c_str());
  ::shm_unlink((name_ + std::string(kOwner)).c_str());
  name_.clear();
  if (lock_ >= 0) ::close(std::exchange(lock_, -1));
}

}  // namespace hvd
