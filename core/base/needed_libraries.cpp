#include "base/needed_libraries.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

namespace hvd {
namespace {

constexpr unsigned char kClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
constexpr unsigned char kOrder =
    std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
/// Limits against malformed files. A program has about ten segments and at most some hundred
/// entries.
constexpr std::size_t kMaxSegments = 256;
constexpr std::size_t kMaxEntries = 16'384;
constexpr std::size_t kMaxNameBytes = 256;

class ReadOnlyFile {
 public:
  explicit ReadOnlyFile(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) {}
  ReadOnlyFile(const ReadOnlyFile&) = delete;
  ReadOnlyFile& operator=(const ReadOnlyFile&) = delete;
  ~ReadOnlyFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const noexcept { return fd_; }

 private:
  const int fd_;
};

using Segment = ElfW(Phdr);
using DynamicEntry = ElfW(Dyn);

/// Fills `room` from the file. False if the file has too few bytes.
bool read_at(int file, std::uint64_t offset, std::span<std::byte> room) {
  const ssize_t got = ::pread(file, room.data(), room.size(), static_cast<off_t>(offset));
  return got >= 0 && static_cast<std::size_t>(got) == room.size();
}

std::vector<Segment> read_segments(int file) {
  ElfW(Ehdr) header{};
  if (!read_at(file, 0, std::as_writable_bytes(std::span(&header, std::size_t{1})))) return {};
  const bool ours = std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
                    header.e_ident[EI_CLASS] == kClass && header.e_ident[EI_DATA] == kOrder;
  if (!ours || header.e_phentsize != sizeof(Segment) || header.e_phnum > kMaxSegments) return {};
  std::vector<Segment> segments(header.e_phnum);
  if (!read_at(file, header.e_phoff, std::as_writable_bytes(std::span(segments)))) return {};
  return segments;
}

std::vector<DynamicEntry> read_entries(int file, const Segment& dynamic) {
  std::vector<DynamicEntry> entries(
      std::min<std::size_t>(dynamic.p_filesz / sizeof(DynamicEntry), kMaxEntries));
  if (!read_at(file, dynamic.p_offset, std::as_writable_bytes(std::span(entries)))) return {};
  entries.erase(std::find_if(entries.begin(), entries.end(),
                             [](const DynamicEntry& entry) { return entry.d_tag == DT_NULL; }),
                entries.end());
  return entries;
}

/// The offset in the file of the byte that is mapped at `address`.
std::optional<std::uint64_t> offset_of(std::uint64_t address, std::span<const Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.p_type != PT_LOAD || address < segment.p_vaddr) continue;
    const std::uint64_t within = address - segment.p_vaddr;
    if (within < segment.p_filesz) return segment.p_offset + within;
  }
  return std::nullopt;
}

/// Reads up to a zero byte, to the end of the file, or kMaxNameBytes - 1 bytes.
std::string read_name(int file, std::uint64_t offset) {
  std::array<char, kMaxNameBytes> room{};
  const ssize_t got = ::pread(file, room.data(), room.size() - 1, static_cast<off_t>(offset));
  return got > 0 ? room.data() : "";
}

}  // namespace

std::vector<std::string> needed_libraries(const std::string& path) {
  const ReadOnlyFile file(path);
  if (file.get() < 0) return {};
  const std::vector<Segment> segments = read_segments(file.get());
  const auto dynamic = std::find_if(segments.begin(), segments.end(), [](const Segment& segment) {
    return segment.p_type == PT_DYNAMIC;
  });
  if (dynamic == segments.end()) return {};
  const std::vector<DynamicEntry> entries = read_entries(file.get(), *dynamic);
  const auto names = std::find_if(entries.begin(), entries.end(), [](const DynamicEntry& entry) {
    return entry.d_tag == DT_STRTAB;
  });
  if (names == entries.end()) return {};
  const auto begin = offset_of(names->d_un.d_ptr, segments);
  if (!begin) return {};
  std::vector<std::string> libraries;
  for (const DynamicEntry& entry : entries) {
    if (entry.d_tag == DT_NEEDED)
      libraries.push_back(read_name(file.get(), *begin + entry.d_un.d_val));
  }
  return libraries;
}

}  // namespace hvd
