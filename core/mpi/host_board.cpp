#include "mpi/host_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "hvd/error.h"

namespace hvd::mpi {

// Both live in shared memory: no pointers, valid when zero. A bell has a cache line of its own, since others write it
// while the owner writes its beat.
struct alignas(64) HostBoard::Header {
  static constexpr std::uint64_t kMagic = 0x3164726f42647668;  // "hvdBord1"
  std::uint64_t magic;
  std::uint64_t slots;
};

struct alignas(128) HostBoard::Slot {
  alignas(128) Doorbell bell;
  alignas(128) LockWords lock;
  alignas(128) std::atomic<std::int64_t> beat;
  std::atomic<std::uint32_t> left;
  std::atomic<std::int32_t> accused;  ///< world rank + 1; 0: nobody
  ProcessIdentity process;
  char cause[512];  ///< of the accusation; zero-terminated
};

static_assert(std::atomic<std::int64_t>::is_always_lock_free, "beats are shared between processes");

std::size_t HostBoard::bytes_for(int slots) noexcept {
  // The header takes the room of one slot, for the slots' alignment.
  static_assert(sizeof(Header) <= sizeof(Slot));
  return (static_cast<std::size_t>(slots) + 1) * sizeof(Slot);
}

HostBoard::Slot& HostBoard::slot(int index) noexcept { return static_cast<Slot*>(memory_)[index + 1]; }

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
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

void* map(int descriptor, std::size_t bytes, const std::string& name) {
  const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes", name, errno);
  return memory;
}

}  // namespace

HostBoard::HostBoard(void* memory, std::size_t bytes, int slots, std::string name) noexcept
    : memory_(memory), bytes_(bytes), slots_(slots), name_(std::move(name)) {}

HostBoard HostBoard::solitary() {
  const std::size_t bytes = bytes_for(1);
  return HostBoard(map(-1, bytes, "(private)"), bytes, 1, {});
}

HostBoard HostBoard::create(const std::string& name, int slots) {
  const std::size_t bytes = bytes_for(slots);
  const File file(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("shm_open", name, errno);
  // Reserves the pages now: with ftruncate alone a full /dev/shm would show later, as SIGBUS.
  const int reserved = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  if (reserved != 0) {
    shm_unlink(name.c_str());
    fail("reserving " + std::to_string(bytes) + " bytes", name, reserved);
  }
  void* memory = nullptr;
  try {
    memory = map(file.get(), bytes, name);
  } catch (...) {
    shm_unlink(name.c_str());
    throw;
  }
  new (memory) Header{Header::kMagic, static_cast<std::uint64_t>(slots)};
  return HostBoard(memory, bytes, slots, name);
}

HostBoard HostBoard::attach(const std::string& name, int slots) {
  const std::size_t bytes = bytes_for(slots);
  const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("shm_open", name, errno);
  struct stat info = {};
  if (fstat(file.get(), &info) != 0) fail("fstat", name, errno);
  if (static_cast<std::size_t>(info.st_size) != bytes) {
    throw Error("shared memory " + name + ": expected " + std::to_string(bytes) + " bytes, got " + std::to_string(info.st_size) +
                "; do all ranks of this host run the same build?");
  }
  void* const memory = map(file.get(), bytes, name);
  HostBoard board(memory, bytes, slots, name);
  const auto* const header = static_cast<const Header*>(memory);
  if (header->magic != Header::kMagic || header->slots != static_cast<std::uint64_t>(slots)) {
    throw Error("shared memory " + name + " does not hold a board of " + std::to_string(slots) +
                " slots; do all ranks of this host run the same build?");
  }
  return board;
}

HostBoard::HostBoard(HostBoard&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      slots_(other.slots_),
      own_(other.own_),
      name_(std::exchange(other.name_, {})),
      watched_(std::move(other.watched_)) {}

HostBoard& HostBoard::operator=(HostBoard&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(slots_, other.slots_);
  std::swap(own_, other.own_);
  std::swap(name_, other.name_);
  std::swap(watched_, other.watched_);
  return *this;
}

HostBoard::~HostBoard() {
  unlink();
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

Doorbell& HostBoard::bell(int index) noexcept { return slot(index).bell; }

LockWords& HostBoard::lock_words(int index) noexcept { return slot(index).lock; }

void HostBoard::enter(int index, TimePoint now) noexcept {
  own_ = index;
  Slot& own = slot(index);
  own.process = current_process();
  own.left.store(0, std::memory_order_relaxed);
  own.accused.store(0, std::memory_order_relaxed);
  own.beat.store(now.count(), std::memory_order_release);
}

void HostBoard::unlink() noexcept {
  if (name_.empty()) return;
  // ENOENT is expected: every rank of the host tries, so that the name goes even when its maker has been killed.
  shm_unlink(name_.c_str());
  name_.clear();
}

void HostBoard::watch_others(TimePoint now) {
  watched_.clear();
  watched_.reserve(static_cast<std::size_t>(slots_));
  for (int index = 0; index < slots_; ++index) {
    if (index == own_) continue;
    Slot& other = slot(index);
    watched_.push_back({index, ProcessWatch(other.process), other.beat.load(std::memory_order_acquire), now});
  }
}

void HostBoard::beat(TimePoint now) noexcept { slot(own_).beat.store(now.count(), std::memory_order_release); }

void HostBoard::farewell() noexcept { slot(own_).left.store(1, std::memory_order_seq_cst); }

void HostBoard::accuse(int world_rank, std::string_view cause) noexcept {
  Slot& own = slot(own_);
  if (own.accused.load(std::memory_order_relaxed) != 0) return;  // others may be reading the text
  const std::size_t length = std::min(cause.size(), sizeof(own.cause) - 1);
  std::memcpy(own.cause, cause.data(), length);
  own.cause[length] = '\0';
  own.accused.store(world_rank + 1, std::memory_order_seq_cst);
}

std::optional<HostBoard::Loss> HostBoard::check(TimePoint now, Duration timeout) {
  for (Watched& watched : watched_) {
    Slot& other = slot(watched.slot);
    // The order matters: a rank says farewell, or accuses, before it ends, so the end must be read first.
    const bool ended = watched.process.ended();
    if (const int accused = other.accused.load(std::memory_order_seq_cst); accused != 0) return Loss{watched.slot, other.cause, accused - 1};
    const std::int64_t beat = other.beat.load(std::memory_order_acquire);
    if (beat != watched.beat) {
      watched.beat = beat;
      watched.seen = now;
    }
    const Duration silence = now - watched.seen;
    if (!ended && silence < timeout) continue;
    if (other.left.load(std::memory_order_seq_cst) != 0) continue;
    const std::string process = "process " + std::to_string(other.process.pid);
    if (ended) return Loss{watched.slot, process + " ended", {}};
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", std::chrono::duration<double>(silence).count());
    return Loss{watched.slot, process + " gave no sign of life for " + seconds + " s", {}};
  }
  return std::nullopt;
}

}  // namespace hvd::mpi
