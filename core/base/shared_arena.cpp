#include "base/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <random>

#include "base/cache_line.h"
#include "base/expect.h"
#include "base/log.h"
#include "base/shared_segment.h"
#include "base/text.h"

namespace hvd {
namespace {

constexpr std::size_t kPage = 4096;
// Every rank maps all arenas of its host, so address space limits the size.
constexpr std::size_t kMaxCapacity = std::size_t{256} << 30;

/// The beginning of the arena's file.
struct ArenaHeader {
  char magic[8];
  std::uint64_t identity;
};
constexpr char kMagic[8] = {'h', 'v', 'd', 'a', 'r', 'e', 'n', 'a'};

std::size_t rounded(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::byte* map_file(int descriptor, std::size_t capacity) {
  void* const memory =
      ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

std::size_t limit_of(int resource) {
  rlimit limit = {};
  const bool limited = ::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0 &&
                       limit.rlim_cur != RLIM_INFINITY;
  return limited ? static_cast<std::size_t>(limit.rlim_cur) : kMaxCapacity;
}

/// A file above RLIMIT_FSIZE ends the process with SIGXFSZ, and the arenas of all ranks must leave
/// most of the address space free.
std::size_t max_capacity() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const std::size_t memory = static_cast<std::size_t>(std::max(pages, 1L)) * kPage;
  const std::size_t room = limit_of(RLIMIT_AS);
  return std::min({memory, limit_of(RLIMIT_FSIZE), room == kMaxCapacity ? room : room / 8});
}

/// Without overcommit a page that is not available at its first write would raise SIGBUS.
SharedArena::Pages pages_of_this_system() {
  int mode = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  return mode == 2 ? SharedArena::Pages::kWhenAllocated : SharedArena::Pages::kWhenWritten;
}

std::shared_ptr<SharedArena> refuse(const char* call, int error) {
  HVD_LOG(kDebug) << "no arena in shared memory: " << call << ": " << std::strerror(error);
  return nullptr;
}

}  // namespace

std::shared_ptr<SharedArena> SharedArena::create() {
  return create(max_capacity() / kPage * kPage, pages_of_this_system());
}

std::shared_ptr<SharedArena> SharedArena::create(std::size_t capacity, Pages pages) {
  capacity = std::max(rounded(capacity, kPage), 2 * kPage);
  if (capacity > limit_of(RLIMIT_FSIZE)) return refuse("a file of that size", EFBIG);
  const int descriptor = ::memfd_create("hvd-arena", MFD_CLOEXEC);
  if (descriptor < 0) return refuse("memfd_create", errno);
  std::byte* base = nullptr;
  if (::ftruncate(descriptor, static_cast<off_t>(capacity)) == 0)
    base = map_file(descriptor, capacity);
  if (base == nullptr) {
    const int error = errno;
    ::close(descriptor);
    return refuse("mapping it", error);
  }
  // A core dump would write all of the address range, holes included.
  ::madvise(base, capacity, MADV_DONTDUMP);
  std::random_device random;
  const std::uint64_t identity = std::uint64_t{random()} << 32 | random();
  const int error = pages == Pages::kWhenAllocated ? reserve_pages(descriptor, 0, kPage) : 0;
  if (error != 0) {
    ::munmap(base, capacity);
    ::close(descriptor);
    return refuse("the first page", error);
  }
  auto* const header = reinterpret_cast<ArenaHeader*>(base);
  std::memcpy(header->magic, kMagic, sizeof(kMagic));
  header->identity = identity;
  return std::shared_ptr<SharedArena>(
      new SharedArena(base, {::getpid(), descriptor, capacity, identity}, pages));
}

SharedArena::SharedArena(std::byte* base, const ArenaAddress& address, Pages pages)
    : base_(base), address_(address), pages_(pages) {
  free_.emplace(kPage, address.capacity - kPage);
  by_size_.emplace(address.capacity - kPage, kPage);
}

SharedArena::~SharedArena() {
  ::munmap(base_, address_.capacity);
  ::close(address_.descriptor);
}

// Maps the file privately, so that the kernel copies each page that the child writes to. With a
// shared mapping the child would change the data of the parent and the other ranks. Only system
// calls are allowed here, because the child has one thread, and locks that other threads of the
// parent held stay locked forever.
void SharedArena::after_fork_in_child() noexcept {
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  const bool first =
      !inherited_.exchange(true, std::memory_order_relaxed);  // a grandchild already has a copy
  if (first && ::mmap(base_, address_.capacity, PROT_READ | PROT_WRITE, kFlags, address_.descriptor,
                      0) == MAP_FAILED) {
    // There may be no memory for a copy, but the child can still read.
    ::mprotect(base_, address_.capacity, PROT_READ);
  }
  mutex_.unlock();
}

bool SharedArena::allocate_pages(std::size_t begin, std::size_t size) const noexcept {
  if (pages_ == Pages::kWhenWritten) return true;
  if (reserve_pages(address_.descriptor, begin, size) == 0) return true;
  ::madvise(base_ + begin, size, MADV_REMOVE);
  return false;
}

// Best fit, and the lowest address among equals: a program that repeats its allocations gets the
// same addresses, whose pages and cache lines are warm.
std::byte* SharedArena::allocate(std::size_t bytes) {
  if (bytes > address_.capacity || inherited()) return nullptr;
  const std::size_t size =
      rounded(std::max<std::size_t>(bytes, 1), bytes < kPage ? kCacheLine : kPage);
  const MutexLock lock(mutex_);
  auto found = by_size_.lower_bound({size, 0});
  // A small block may begin anywhere. A large one begins at a page boundary.
  std::size_t begin = 0;
  for (; found != by_size_.end(); ++found) {
    begin = rounded(found->second, size < kPage ? kCacheLine : kPage);
    if (begin + size <= found->second + found->first) break;
  }
  if (found == by_size_.end() || !allocate_pages(begin, size)) return nullptr;
  const auto [block_size, block] = *found;
  const std::size_t end = begin + size;
  const std::size_t rest = block + block_size - end;
  // Calls that may throw come first.
  Blocks blocks;
  Sizes sizes;
  if (begin > block) {
    blocks.emplace(block, begin - block);
    sizes.emplace(begin - block, block);
  }
  if (rest > 0) {
    blocks.emplace(end, rest);
    sizes.emplace(rest, end);
  }
  BlockInUse& taken = in_use_.try_emplace(begin).first->second;
  taken.block = free_.extract(block);
  taken.size = by_size_.extract(found);
  taken.block.key() = begin;
  taken.block.mapped() = size;
  free_.merge(blocks);
  by_size_.merge(sizes);
  used_ += size;
  return base_ + begin;
}

void SharedArena::deallocate(std::byte* memory, bool returns_pages) noexcept {
  if (inherited()) return;
  const MutexLock lock(mutex_);
  HVD_EXPECT(in_use_.contains(static_cast<std::size_t>(memory - base_)),
             "the memory is from allocate(), and was not freed before");
  auto [block, size_node] =
      std::move(in_use_.extract(static_cast<std::size_t>(memory - base_)).mapped());
  std::size_t begin = block.key();
  std::size_t size = block.mapped();
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
  block.key() = begin;
  block.mapped() = size;
  size_node.value() = {size, begin};
  free_.insert(std::move(block));
  by_size_.insert(std::move(size_node));
}

void SharedArena::return_pages() noexcept {
  if (inherited()) return;
  const MutexLock lock(mutex_);
  for (const auto& [begin, size] : free_) {
    const std::size_t first = rounded(begin, kPage);
    const std::size_t end = (begin + size) / kPage * kPage;
    if (first < end) ::madvise(base_ + first, end - first, MADV_REMOVE);
  }
}

std::optional<std::uint64_t> SharedArena::offset_of(const void* memory,
                                                    std::size_t bytes) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto base = reinterpret_cast<std::uintptr_t>(base_);
  if (address < base || address - base + bytes > address_.capacity) return std::nullopt;
  return address - base;
}

std::size_t SharedArena::used() const {
  const MutexLock lock(mutex_);
  return used_;
}

std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedArena>& arena,
                                           std::size_t bytes, bool returns_pages) {
  if (std::byte* const memory = arena ? arena->allocate(bytes) : nullptr) {
    return {memory,
            [arena, returns_pages](std::byte* mine) { arena->deallocate(mine, returns_pages); }};
  }
  constexpr std::align_val_t kAlignment{kCacheLine};
  return {static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), kAlignment)),
          [](std::byte* mine) { ::operator delete(mine, kAlignment); }};
}

std::unique_ptr<PeerArena> PeerArena::map(const ArenaAddress& address) {
  if (address.process == 0) return nullptr;
  const std::string path = text("/proc/", address.process, "/fd/", address.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  // The process id may belong to another process by now, and the descriptor to another file.
  ArenaHeader header = {};
  const bool ours = ::pread(descriptor, &header, sizeof(header), 0) == sizeof(header) &&
                    std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 &&
                    header.identity == address.identity &&
                    ::lseek(descriptor, 0, SEEK_END) == static_cast<off_t>(address.capacity);
  std::byte* const base = ours ? map_file(descriptor, address.capacity) : nullptr;
  ::close(descriptor);
  if (base == nullptr) return nullptr;
  // A child does not need the mapping. A core dump would write all of the address range, holes
  // included.
  ::madvise(base, address.capacity, MADV_DONTFORK);
  ::madvise(base, address.capacity, MADV_DONTDUMP);
  return std::unique_ptr<PeerArena>(new PeerArena(base, address.capacity));
}

PeerArena::~PeerArena() { ::munmap(base_, capacity_); }

}  // namespace hvd
