#include "bench/raw_kernels.h"

#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cache_line.h"
#include "hvd/hvd.h"
#include "hvd/memory.h"
#include "kernels/kernels.h"

namespace hvd::bench {
namespace {

/// Maps one range of memory of every rank of the host. Finds it through /proc, without hvd's
/// runtime. Not thread-safe.
class PeerMemory {
 public:
  /// Collective. @param own memory of a file that is mapped shared, such as that of
  /// hvd::allocate_shared(); of equal size on all ranks
  PeerMemory(MPI_Comm communicator, std::byte* own, std::size_t bytes);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory();

  /// False when some rank's memory cannot be mapped by some other: the same on every rank.
  bool complete() const noexcept { return complete_; }
  /// The range of each rank. This rank's is its own memory, not a mapping. @pre complete()
  const std::vector<std::byte*>& of_ranks() const noexcept { return of_ranks_; }

 private:
  struct Mapping {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };

  std::vector<std::byte*> of_ranks_;
  std::vector<Mapping> mappings_;
  bool complete_ = false;
};

/// The location at which other processes find a range of memory. Plain data, for MPI.
struct MemoryLocation {
  std::int64_t process = 0;
  std::int64_t descriptor = -1;
  std::uint64_t offset = 0;  ///< in the file
};

struct MappedFile {
  std::uint64_t offset = 0;
  std::uint64_t inode = 0;
  dev_t device = 0;
};

/// The shared mapping that contains the whole range; see proc(5) for the lines of /proc/self/maps.
std::optional<MappedFile> file_of(const std::byte* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long from = 0, to = 0, offset = 0, inode = 0;
    unsigned major_number = 0, minor_number = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%llx-%llx %4s %llx %x:%x %llu", &from, &to, rights, &offset,
                    &major_number, &minor_number, &inode) != 7)
      continue;
    if (begin < from || begin + bytes > to) continue;
    if (rights[3] != 's') return std::nullopt;
    return MappedFile{offset + (begin - from), inode, makedev(major_number, minor_number)};
  }
  return std::nullopt;
}

MemoryLocation locate(const std::byte* memory, std::size_t bytes) {
  const auto file = file_of(memory, bytes);
  if (!file) return {};
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(entry.path().filename());
    struct stat status {};
    if (::fstat(descriptor, &status) != 0 || status.st_ino != file->inode ||
        status.st_dev != file->device)
      continue;
    return {::getpid(), descriptor, file->offset};
  }
  return {};
}

PeerMemory::PeerMemory(MPI_Comm communicator, std::byte* own, std::size_t bytes) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  const MemoryLocation mine = locate(own, bytes);
  std::vector<MemoryLocation> locations(static_cast<std::size_t>(size));
  MPI_Allgather(&mine, sizeof(MemoryLocation), MPI_BYTE, locations.data(), sizeof(MemoryLocation),
                MPI_BYTE, communicator);
  int mapped = mine.process != 0 ? 1 : 0;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (int peer = 0; peer < size; ++peer) {
    const MemoryLocation& location = locations[static_cast<std::size_t>(peer)];
    of_ranks_.push_back(own);
    if (peer == rank || location.process == 0) continue;
    const std::string path =
        "/proc/" + std::to_string(location.process) + "/fd/" + std::to_string(location.descriptor);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    const std::uint64_t before = location.offset % page;
    const Mapping mapping{::mmap(nullptr, bytes + before, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                                 static_cast<off_t>(location.offset - before)),
                          bytes + before};
    if (file >= 0) ::close(file);
    if (mapping.memory == MAP_FAILED) {
      mapped = 0;
      continue;
    }
    mappings_.push_back(mapping);
    of_ranks_.back() = static_cast<std::byte*>(mapping.memory) + before;
  }
  MPI_Allreduce(MPI_IN_PLACE, &mapped, 1, MPI_INT, MPI_MIN, communicator);
  complete_ = mapped != 0;
}

PeerMemory::~PeerMemory() {
  for (const Mapping& mapping : mappings_) ::munmap(mapping.memory, mapping.bytes);
}

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSlotBytes = std::size_t{128} << 10;  // as in the backend
constexpr std::size_t kSmallBytes = 4096;                   // likewise: every rank reduces all

/// Counts arrivals. A rank that waits for long yields its core.
class Barrier {
 public:
  Barrier(const PeerMemory& memory, int rank) : rank_(static_cast<std::size_t>(rank)) {
    for (std::byte* const page : memory.of_ranks())
      arrived_.push_back(reinterpret_cast<std::atomic<std::uint64_t>*>(page));
  }

  void wait() noexcept {
    const std::uint64_t mine = arrived_[rank_]->fetch_add(1, std::memory_order_acq_rel) + 1;
    for (const auto* other : arrived_) {
      constexpr int kSpins = 20'000;  // some 20 us
      for (int spins = 0; other->load(std::memory_order_acquire) < mine; ++spins) {
        if (spins >= kSpins) sched_yield();
      }
    }
  }

 private:
  const std::size_t rank_;
  std::vector<std::atomic<std::uint64_t>*> arrived_;
};

/// One zeroed page for the barrier, and `bytes` behind it.
std::shared_ptr<std::byte> zeroed(std::size_t bytes) {
  std::shared_ptr<std::byte> memory = allocate_shared(kPage + bytes);
  std::memset(memory.get(), 0, kPage + bytes);
  return memory;
}

/// Returns the begin and end of a rank's slice, in whole cache lines.
std::pair<std::size_t, std::size_t> slice_of(std::size_t bytes, int rank, int ranks) {
  const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const auto edge = [&](int r) {
    return std::min(
        bytes, lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranks) * kCacheLine);
  };
  return {edge(rank), edge(rank + 1)};
}

void sum(const std::vector<const std::byte*>& sources, std::span<std::byte* const> destinations,
         std::size_t bytes) {
  if (bytes == 0) return;
  reduce_to_all(sources, destinations, static_cast<std::int64_t>(bytes / sizeof(float)),
                DataType::kFloat32, ReduceOp::kSum, {});
}

class RawShared final : public Contender {
 public:
  RawShared(const Exercise& exercise, MPI_Comm communicator)
      : page_(zeroed(0)),
        pages_(communicator, page_.get(), kPage),
        tensors_(communicator, reinterpret_cast<std::byte*>(exercise.output().data()),
                 exercise.bytes()),
        barrier_(pages_, exercise.rank()),
        slice_(slice_of(exercise.bytes(), exercise.rank(), exercise.ranks())) {
    for (std::byte* const tensor : tensors_.of_ranks()) {
      sources_.push_back(tensor + slice_.first);
      destinations_.push_back(tensor + slice_.first);
    }
  }
  bool possible() const { return pages_.complete() && tensors_.complete(); }
  std::string name() const override { return "raw-shared"; }

  void run() override {
    barrier_.wait();
    sum(sources_, destinations_, slice_.second - slice_.first);
    barrier_.wait();
  }

 private:
  const std::shared_ptr<std::byte> page_;
  const PeerMemory pages_;
  const PeerMemory tensors_;
  Barrier barrier_;
  const std::pair<std::size_t, std::size_t> slice_;
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> destinations_;
};

/// A rank's shared memory: the barrier's page, two slots for its input and two for its reduced
/// slice. In step k every rank fills the slot of round k, reduces round (k - 1), copies the results
/// of round (k - 2), and then waits for the other ranks. So a step reads only slots that the
/// previous step has written, and no rank still reads the slots that it writes.
class RawStaged final : public Contender {
 public:
  RawStaged(const Exercise& exercise, MPI_Comm communicator)
      : exercise_(exercise),
        memory_(zeroed(4 * kSlotBytes)),
        memories_(communicator, memory_.get(), kPage + 4 * kSlotBytes),
        barrier_(memories_, exercise.rank()),
        sources_(static_cast<std::size_t>(exercise.ranks())) {}
  bool possible() const { return memories_.complete(); }
  std::string name() const override { return "raw-staged"; }

  void run() override {
    if (exercise_.bytes() <= kSmallBytes) {
      run_small();
      return;
    }
    const std::size_t rounds = (exercise_.bytes() + kSlotBytes - 1) / kSlotBytes;
    for (std::size_t step = 0; step < rounds + 2; ++step) {
      if (step < rounds) fill(step);
      if (step >= 1 && step <= rounds) process(step - 1);
      if (step >= 2) copy_results(step - 2);
      if (step <= rounds) barrier_.wait();
    }
    first_round_ += rounds;
  }

 private:
  std::byte* data() const { return reinterpret_cast<std::byte*>(exercise_.output().data()); }
  std::size_t size_of(std::size_t round) const {
    return std::min(kSlotBytes, exercise_.bytes() - round * kSlotBytes);
  }
  std::byte* slot(std::size_t round, int rank, bool result) const {
    const std::size_t index = (first_round_ + round) % 2 + (result ? 2 : 0);
    return memories_.of_ranks()[static_cast<std::size_t>(rank)] + kPage + index * kSlotBytes;
  }

  void run_small() {
    std::memcpy(slot(0, exercise_.rank(), false), data(), exercise_.bytes());
    barrier_.wait();
    for (int rank = 0; rank < exercise_.ranks(); ++rank)
      sources_[static_cast<std::size_t>(rank)] = slot(0, rank, false);
    std::byte* const to = data();
    sum(sources_, {&to, 1}, exercise_.bytes());
    ++first_round_;
  }

  // Copies all but this rank's own slice, which it reads in place.
  void fill(std::size_t round) {
    const auto [begin, end] = slice_of(size_of(round), exercise_.rank(), exercise_.ranks());
    std::byte* const to = slot(round, exercise_.rank(), false);
    const std::byte* const from = data() + round * kSlotBytes;
    std::memcpy(to, from, begin);
    std::memcpy(to + end, from + end, size_of(round) - end);
  }

  void process(std::size_t round) {
    const auto [begin, end] = slice_of(size_of(round), exercise_.rank(), exercise_.ranks());
    for (int rank = 0; rank < exercise_.ranks(); ++rank)
      sources_[static_cast<std::size_t>(rank)] = slot(round, rank, false) + begin;
    std::byte* const own = data() + round * kSlotBytes + begin;
    sources_[static_cast<std::size_t>(exercise_.rank())] = own;
    std::byte* const to[] = {own, slot(round, exercise_.rank(), true) + begin};
    sum(sources_, to, end - begin);
  }

  void copy_results(std::size_t round) {
    for (int rank = 0; rank < exercise_.ranks(); ++rank) {
      if (rank == exercise_.rank()) continue;
      const auto [begin, end] = slice_of(size_of(round), rank, exercise_.ranks());
      std::memcpy(data() + round * kSlotBytes + begin, slot(round, rank, true) + begin,
                  end - begin);
    }
  }

  const Exercise& exercise_;
  const std::shared_ptr<std::byte> memory_;
  const PeerMemory memories_;
  Barrier barrier_;
  std::vector<const std::byte*> sources_;
  std::size_t first_round_ = 0;
};

template <class Kernel>
std::unique_ptr<Contender> if_possible(const Exercise& exercise, MPI_Comm communicator) {
  auto kernel = std::make_unique<Kernel>(exercise, communicator);
  return kernel->possible() ? std::move(kernel) : nullptr;
}

}  // namespace

std::unique_ptr<Contender> make_raw_kernel(const Exercise& exercise, MPI_Comm communicator) {
  if (exercise.kind() != OpKind::kAllreduce || exercise.ranks() == 1 ||
      hvd::local_size() != exercise.ranks())
    return nullptr;
  if (is_shared(exercise.output().data(), exercise.bytes()))
    return if_possible<RawShared>(exercise, communicator);
  return if_possible<RawStaged>(exercise, communicator);
}

}  // namespace hvd::bench
