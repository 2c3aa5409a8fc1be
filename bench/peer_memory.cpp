#include "bench/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace hvd::bench {
namespace {

/// Where other processes find a stretch of memory. Plain data, for MPI.
struct Place {
  std::int64_t process = 0;
  std::int64_t descriptor = -1;
  std::uint64_t offset = 0;  ///< in the file
};

struct MappedFile {
  std::uint64_t offset = 0;
  std::uint64_t inode = 0;
  dev_t device = 0;
};

/// The shared mapping that has all of this; see proc(5) for the lines of /proc/self/maps.
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

Place place_of(const std::byte* memory, std::size_t bytes) {
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

}  // namespace

PeerMemory::PeerMemory(MPI_Comm communicator, std::byte* own, std::size_t bytes) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  const Place mine = place_of(own, bytes);
  std::vector<Place> places(static_cast<std::size_t>(size));
  MPI_Allgather(&mine, sizeof(Place), MPI_BYTE, places.data(), sizeof(Place), MPI_BYTE,
                communicator);
  int mapped = mine.process != 0 ? 1 : 0;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (int peer = 0; peer < size; ++peer) {
    const Place& place = places[static_cast<std::size_t>(peer)];
    of_ranks_.push_back(own);
    if (peer == rank || place.process == 0) continue;
    const std::string path =
        "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    const std::uint64_t before = place.offset % page;
    const Mapping mapping{::mmap(nullptr, bytes + before, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                                 static_cast<off_t>(place.offset - before)),
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

}  // namespace hvd::bench
