#include "backend/shm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "hvd/error.h"

namespace hvd::shm {
namespace {

[[noreturn]] void fail(const std::string& action, const std::string& name, int error) {
  throw Error("shared memory " + name + ": " + action + " failed: " + std::strerror(error) +
              "; see that /dev/shm is mounted, writable and has room (docker: --shm-size), or set HVD_BACKEND=mpi");
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

std::byte* map(const File& file, std::size_t bytes, const std::string& name) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes", name, errno);
  return static_cast<std::byte*>(memory);
}

}  // namespace

std::unique_ptr<Segment> Segment::create(const std::string& name, std::size_t bytes) {
  const File file(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("shm_open", name, errno);
  const int reserved = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  if (reserved != 0) {
    ::shm_unlink(name.c_str());
    fail("reserving " + std::to_string(bytes) + " bytes", name, reserved);
  }
  try {
    return std::unique_ptr<Segment>(new Segment(name, map(file, bytes, name), bytes));
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

std::unique_ptr<Segment> Segment::attach(const std::string& name, std::size_t bytes) {
  const File file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0 && errno == ENOENT) return nullptr;
  if (file.get() < 0) fail("shm_open", name, errno);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail("fstat", name, errno);
  if (static_cast<std::size_t>(info.st_size) != bytes) return nullptr;  // its maker is still reserving pages
  return std::unique_ptr<Segment>(new Segment(name, map(file, bytes, name), bytes));
}

Segment::~Segment() {
  unlink();
  ::munmap(data_, bytes_);
}

void Segment::unlink() noexcept {
  if (name_.empty()) return;
  ::shm_unlink(name_.c_str());
  name_.clear();
}

}  // namespace hvd::shm
