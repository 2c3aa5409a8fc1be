#include "base/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <random>
#include <string>

#include "base/log.h"

namespace hvd {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLine = 64;
// Every rank maps every arena of its host, so that address space is what limits it.
constexpr std::size_t kMostCapacity = std::size_t{256} << 30;

/// At the beginning of the file.
struct Header {
  char magic[8];
  std::uint64_t identity;
};
constexpr char kMagic[8] = {'h', 'v', 'd', 'a', 'r', 'e', 'n', 'a'};

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::byte* map_file(int descriptor, std::size_t capacity) {
  void* const memory = ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

// A core dump would write all of the address range, holes included.
void mark(std::byte* base, std::size_t capacity) {
  ::madvise(base, capacity, MADV_DONTFORK);
  ::madvise(base, capacity, MADV_DONTDUMP);
}

std::shared_ptr<SharedArena> refuse(const char* call, int error) {
  HVD_LOG(kDebug) << "no arena in shared memory: " << call << ": " << std::strerror(error);
  return nullptr;
}

}  // namespace

std::shared_ptr<SharedArena> SharedArena::create() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  return create(std::min(static_cast<std::size_t>(std::max(pages, 1L)) * kPage, kMostCapacity));
}

std::shared_ptr<SharedArena> SharedArena::create(std::size_t capacity) {
  capacity = std::max(rounded(capacity, kPage), 2 * kPage);
  const int descriptor = ::memfd_create("hvd-arena", MFD_CLOEXEC);
  if (descriptor < 0) return refuse("memfd_create", errno);
  std::byte* base = nullptr;
  if (::ftruncate(descriptor, static_cast<off_t>(capacity)) == 0) base = map_file(descriptor, capacity);
  if (base == nullptr) {
    const int error = errno;
    ::close(descriptor);
    return refuse("mapping it", error);
  }
  mark(base, capacity);
  std::random_device random;
  const std::uint64_t identity = std::uint64_t{random()} << 32 | random();
  auto* const header = reinterpret_cast<Header*>(base);
  std::memcpy(header->magic, kMagic, sizeof(kMagic));
  header->identity = identity;
  return std::shared_ptr<SharedArena>(new SharedArena(base, {::getpid(), descriptor, capacity, identity}));
}

SharedArena::SharedArena(std::byte* base, const ArenaAddress& address) : base_(base), address_(address) {
  free_.emplace(kPage, address.capacity - kPage);
  by_size_.emplace(address.capacity - kPage, kPage);
}

SharedArena::~SharedArena() {
  ::munmap(base_, address_.capacity);
  ::close(address_.descriptor);
}

// Best fit, the lowest of equals: a program that repeats its allocations gets the same addresses again, with pages and caches warm.
std::byte* SharedArena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(std::max<std::size_t>(bytes, 1), bytes < kPage ? kLine : kPage);
  const std::lock_guard lock(mutex_);
  auto found = by_size_.lower_bound({size, 0});
  // A small block may lie anywhere; a large one begins a page, which the blocks of small ones may have moved away from.
  std::size_t begin = 0;
  for (; found != by_size_.end(); ++found) {
    begin = rounded(found->second, size < kPage ? kLine : kPage);
    if (begin + size <= found->second + found->first) break;
  }
  if (found == by_size_.end()) return nullptr;
  const auto [block_size, block] = *found;
  by_size_.erase(found);
  free_.erase(block);
  if (begin > block) {
    free_.emplace(block, begin - block);
    by_size_.emplace(begin - block, block);
  }
  const std::size_t end = begin + size;
  if (const std::size_t rest = block + block_size - end; rest > 0) {
    free_.emplace(end, rest);
    by_size_.emplace(rest, end);
  }
  taken_.emplace(begin, size);
  used_ += size;
  return base_ + begin;
}

void SharedArena::deallocate(std::byte* memory, bool returns_pages) noexcept {
  const std::lock_guard lock(mutex_);
  const auto taken = taken_.find(static_cast<std::size_t>(memory - base_));
  std::size_t begin = taken->first;
  std::size_t size = taken->second;
  taken_.erase(taken);
  used_ -= size;
  if (returns_pages && size >= kPage) ::madvise(base_ + begin, size, MADV_REMOVE);
  const auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + size) {
    size += next->second;
    by_size_.erase({next->second, next->first});
    free_.erase(next);
  }
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      size += before->second;
      by_size_.erase({before->second, before->first});
      free_.erase(before);
    }
  }
  free_.emplace(begin, size);
  by_size_.emplace(size, begin);
}

std::optional<std::uint64_t> SharedArena::offset_of(const void* memory, std::size_t bytes) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto base = reinterpret_cast<std::uintptr_t>(base_);
  if (address < base || address - base + bytes > address_.capacity) return std::nullopt;
  return address - base;
}

std::size_t SharedArena::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedArena>& arena, std::size_t bytes, bool returns_pages) {
  if (std::byte* const memory = arena ? arena->allocate(bytes) : nullptr) {
    return {memory, [arena, returns_pages](std::byte* mine) { arena->deallocate(mine, returns_pages); }};
  }
  constexpr std::align_val_t kAlignment{kLine};
  return {static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), kAlignment)),
          [](std::byte* mine) { ::operator delete(mine, kAlignment); }};
}

std::unique_ptr<PeerArena> PeerArena::map(const ArenaAddress& address) {
  if (address.process == 0) return nullptr;
  const std::string path = "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  // Another process may have that number here, and another file that descriptor.
  Header header = {};
  const bool ours = ::pread(descriptor, &header, sizeof(header), 0) == sizeof(header) &&
                    std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.identity == address.identity &&
                    ::lseek(descriptor, 0, SEEK_END) == static_cast<off_t>(address.capacity);
  std::byte* const base = ours ? map_file(descriptor, address.capacity) : nullptr;
  ::close(descriptor);
  if (base == nullptr) return nullptr;
  mark(base, address.capacity);
  return std::unique_ptr<PeerArena>(new PeerArena(base, address.capacity));
}

PeerArena::~PeerArena() { ::munmap(base_, capacity_); }

}  // namespace hvd
