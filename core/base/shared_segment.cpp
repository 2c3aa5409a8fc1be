#include "base/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

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
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

std::byte* map(int descriptor, std::size_t bytes, const std::string& name) {
  const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes", name, errno);
  return static_cast<std::byte*>(memory);
}

}  // namespace

// Before Linux 6.11 a signal ends the call with nothing done. So it is repeated, for a piece so small that it gets done between two ticks of a
// profiler's timer.
int reserve_pages(int descriptor, std::size_t begin, std::size_t size) noexcept {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  for (std::size_t done = 0; done < size; done += kPiece) {
    int error = EINTR;
    while (error == EINTR) {
      error = ::posix_fallocate(descriptor, static_cast<off_t>(begin + done), static_cast<off_t>(std::min(kPiece, size - done)));
    }
    if (error != 0) return error;
  }
  return 0;
}

std::unique_ptr<SharedSegment> SharedSegment::create(const std::string& name, std::size_t bytes) {
  const File file(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("shm_open", name, errno);
  const int reserved = reserve_pages(file.get(), 0, bytes);
  if (reserved != 0) {
    ::shm_unlink(name.c_str());
    fail("reserving " + std::to_string(bytes) + " bytes", name, reserved);
  }
  try {
    return std::unique_ptr<SharedSegment>(new SharedSegment(name, map(file.get(), bytes, name), bytes));
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

std::unique_ptr<SharedSegment> SharedSegment::attach(const std::string& name, std::size_t bytes) {
  const File file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0 && errno == ENOENT) return nullptr;
  if (file.get() < 0) fail("shm_open", name, errno);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail("fstat", name, errno);
  if (static_cast<std::size_t>(info.st_size) != bytes) return nullptr;  // its maker is still reserving pages
  return std::unique_ptr<SharedSegment>(new SharedSegment(name, map(file.get(), bytes, name), bytes));
}

std::unique_ptr<SharedSegment> SharedSegment::unshared(std::size_t bytes) {
  return std::unique_ptr<SharedSegment>(new SharedSegment({}, map(-1, bytes, "(private)"), bytes));
}

SharedSegment::~SharedSegment() {
  unlink();
  ::munmap(data_, bytes_);
}

void SharedSegment::unlink() noexcept {
  if (name_.empty()) return;
  // ENOENT is expected: every process tries, so that the name goes even when its maker has been killed.
  ::shm_unlink(name_.c_str());
  name_.clear();
}

}  // namespace hvd
