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

#include "hvd/error.h"

namespace hvd {
namespace {

[[noreturn]] void fail(const std::string& action, const std::string& name, int error) {
  throw Error("shared memory " + name + ": " + action + " failed: " + std::strerror(error) +
              "; see that /dev/shm is mounted, writable and has room (docker: --shm-size)");
}

/// Closes the descriptor; the mapping stays.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File() {
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
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes", name, errno);
  return static_cast<std::byte*>(memory);
}

std::string path_of(const std::string& name) { return "/dev/shm" + name; }

/// The memfd that the link of that name leads to. @throws hvd::Error when it leads elsewhere; with
/// ENOENT in errno when the link is gone
File open_nameless(const std::string& name) {
  File file(::open(path_of(name).c_str(), O_RDWR | O_CLOEXEC));
  const int error = errno;
  char link[PATH_MAX];
  if (file.get() < 0 && error == ENOENT &&
      ::readlink(path_of(name).c_str(), link, sizeof link) < 0) {
    errno = ENOENT;
    return file;
  }
  if (file.get() < 0) fail("open of its maker's memory", name, error);
  const std::string self = "/proc/self/fd/" + std::to_string(file.get());
  const ssize_t length = ::readlink(self.c_str(), link, sizeof link);
  const bool ours = length > 0 && std::string_view(link, static_cast<std::size_t>(length)) ==
                                      "/memfd:" + name + " (deleted)";
  if (!ours) fail("finding its maker's memory", name, ENXIO);
  return file;
}

constexpr std::string_view kOwner = ".owner";

/// A file of this name, empty, locked by this process. Its name may be yet to come: see
/// give_name(). Nothing when the name is taken, or there can be none; errno says why.
File make_locked(const std::string& name) {
  const bool can_name_it = ::access("/proc/self/fd", F_OK) == 0;
  File file(can_name_it ? ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) : -1);
  if (file.get() < 0)
    file = File(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  // Nobody else knows the file, but for one who looks for abandoned ones, and lets it go.
  while (file.get() >= 0 && ::flock(file.get(), LOCK_SH) != 0 && errno == EINTR) {
  }
  return file;
}

bool has_name(int file) {
  struct stat info = {};
  return ::fstat(file, &info) == 0 && info.st_nlink > 0;
}

/// False: errno says why.
bool give_name(int file, const std::string& name) {
  if (has_name(file)) return true;
  const std::string self = "/proc/self/fd/" + std::to_string(file);
  return ::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path_of(name).c_str(), AT_SYMLINK_FOLLOW) == 0;
}

void remove_if_abandoned(const std::filesystem::path& path) {
  // NONBLOCK: of a pipe of this name.
  const File file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
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

// Before Linux 6.11 a signal ends the call with nothing done. So it is repeated, for a piece so
// small that it gets done between two ticks of a profiler's timer.
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

// Note [Who has made it]
// A maker that is killed cannot remove the name. So it holds a lock (flock) on the file for as long
// as the file has a name: the kernel gives the lock free when the process ends, and whoever then
// gets it knows that nobody is left who could need the name. No numbers of processes are asked for,
// which mean nothing in another pid namespace.
//
// The name appears when the lock is held and the pages are there: the file is made without one, and
// linked. Where that cannot be (a /dev/shm that is no tmpfs, no /proc) it has its name first, and
// is locked before it is more than empty; so what is empty stays.
//
// A symbolic link cannot be locked. Its maker locks a file of one byte beside it, which comes
// before it and goes after it, and takes no room either.

void SharedSegment::remove_abandoned(const std::filesystem::path& folder) noexcept {
  try {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().filename().string().starts_with(kPrefix.substr(1)))
        remove_if_abandoned(entry.path());
    }
  } catch (const std::exception&) {
    // The next one finds it.
  }
}

std::unique_ptr<SharedSegment> SharedSegment::create(const std::string& name, std::size_t bytes) {
  File file = make_locked(name);
  if (file.get() < 0) fail("making it", name, errno);
  const bool named = has_name(file.get());
  const int reserved = reserve_pages(file.get(), 0, bytes);
  if (reserved == ENOSPC) {
    if (named) ::shm_unlink(name.c_str());
    if (auto segment = create_without_room(name, bytes)) return segment;
  }
  std::unique_ptr<SharedSegment> segment;
  try {
    if (reserved != 0) fail("reserving " + std::to_string(bytes) + " bytes", name, reserved);
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
// Containers have 64 MiB there by default, and others may fill it while a job runs. Then the pages
// are those of a memfd, which no limit of a file system counts, and the name is a symbolic link to
// /proc/PID/fd/N. tmpfs keeps so short a link in the inode, so it takes no room. The descriptor
// stays open while the segment lives. Whoever follows the link checks that it has led to a memfd of
// this very name: where processes of one host do not see each other's numbers, it leads elsewhere
// or nowhere.

bool SharedSegment::needs_no_room() noexcept {
  const File file(::memfd_create("hvd-probe", MFD_CLOEXEC));
  return file.get() >= 0;
}

/// Null when there is no memory that way either.
std::unique_ptr<SharedSegment> SharedSegment::create_without_room(const std::string& name,
                                                                  std::size_t bytes) {
  File memory(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (memory.get() < 0 || reserve_pages(memory.get(), 0, bytes) != 0) return nullptr;
  std::unique_ptr<SharedSegment> segment(
      new SharedSegment({}, map(memory.get(), bytes, name), bytes));
  const std::string beside = name + std::string(kOwner);
  File owner = make_locked(beside);
  if (owner.get() < 0 || ::ftruncate(owner.get(), 1) != 0 || !give_name(owner.get(), beside))
    fail("naming its maker", name, errno);
  segment->name_ = name;
  segment->lock_ = owner.release();
  segment->nameless_ = memory.release();
  const std::string target =
      "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(segment->nameless_);
  if (::symlink(target.c_str(), path_of(name).c_str()) != 0) fail("symlink", name, errno);
  return segment;
}

std::unique_ptr<SharedSegment> SharedSegment::attach(const std::string& name, std::size_t bytes) {
  File file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0 && errno == ELOOP) file = open_nameless(name);  // shm_open() follows no link
  if (file.get() < 0 && errno == ENOENT) return nullptr;
  if (file.get() < 0) fail("shm_open", name, errno);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail("fstat", name, errno);
  if (static_cast<std::size_t>(info.st_size) != bytes)
    return nullptr;  // its maker is still reserving pages
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
  // ENOENT is expected: every process tries, so that the name goes even when its maker has been
  // killed.
  ::shm_unlink(name_.c_str());
  ::shm_unlink((name_ + std::string(kOwner)).c_str());
  name_.clear();
  if (lock_ >= 0) ::close(std::exchange(lock_, -1));
}

}  // namespace hvd
