#include "command/controller.h"

#include <dlfcn.h>
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

#include "system/process.h"
#include "system/unique_fd.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kUcxLibrary = "libucp.so.0";
constexpr std::array<std::string_view, 3> kControllerNames = {"auto", "mpi", "ucx"};

/// Whether the library belongs to MPI, such as libmpi.so.40, libmpi_cxx.so.40, libmpi_mpifh.so.40
/// and libmpich.so.12, but not libmpir.so.23.
bool is_of_mpi(std::string_view library) {
  return library.starts_with("libmpi.") || library.starts_with("libmpi_") ||
         library.starts_with("libmpich");
}

}  // namespace

std::string_view to_string(Controller controller) {
  return kControllerNames[static_cast<std::size_t>(controller)];
}

std::optional<Controller> parse_controller(std::string_view name) {
  const auto found = std::find(kControllerNames.begin(), kControllerNames.end(), name);
  if (found == kControllerNames.end()) return std::nullopt;
  return static_cast<Controller>(found - kControllerNames.begin());
}

ControllerChoice choose_controller(Controller asked, const ControllerFacts& facts) {
  if (asked != Controller::kAuto) return {asked, "--controller is given"};
  if (!facts.batch_system.empty())
    return {Controller::kMpi, facts.batch_system + " shows an allocation; mpirun gets its hosts"};
  if (facts.mpi_args) return {Controller::kMpi, "--mpi-args is given"};
  if (facts.names_mpirun) return {Controller::kMpi, "HVD_MPIRUN names an mpirun"};
  if (!facts.needs_mpi.empty()) return {Controller::kMpi, facts.needs_mpi};
  if (facts.has_ucx()) return {Controller::kUcx, "UCX is found"};
  return {Controller::kMpi, facts.has_mpirun ? "an mpirun is found, and no UCX"
                                             : "neither an mpirun nor UCX is found"};
}

std::string program_that_needs_mpi(const std::vector<std::string>& command) {
  for (std::size_t i = 0; i < command.size(); ++i) {
    const std::string& word = command[i];
    // Skips arguments without a slash: they are rarely programs, and each would cost a search of
    // PATH.
    if (i > 0 && word.find('/') == std::string::npos) continue;
    const ProgramSearch found = find_program(word);
    if (!found.executable) continue;
    for (const std::string& library : needed_libraries(found.path))
      if (is_of_mpi(library)) return word + " needs " + library;
  }
  return "";
}

bool finds_ucx() {
  if (!kWithUcx) return false;
  const pid_t child = ::fork();
  if (child < 0) return false;
  if (child == 0) {
    const int nowhere = ::open("/dev/null", O_RDWR);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(nowhere, fd);
    ::_exit(::dlopen(kUcxLibrary, RTLD_LAZY | RTLD_LOCAL) != nullptr ? 0 : 1);
  }
  return wait_for(child).code == 0;
}

namespace {

constexpr unsigned char kClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
constexpr unsigned char kOrder =
    std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
/// Limits against malformed files. A program has about ten segments and at most some hundred
/// entries.
constexpr std::size_t kMostSegments = 256;
constexpr std::size_t kMostEntries = 16'384;
constexpr std::size_t kMostLetters = 256;

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
  if (!ours || header.e_phentsize != sizeof(Segment) || header.e_phnum > kMostSegments) return {};
  std::vector<Segment> segments(header.e_phnum);
  if (!read_at(file, header.e_phoff, std::as_writable_bytes(std::span(segments)))) return {};
  return segments;
}

std::vector<DynamicEntry> read_entries(int file, const Segment& dynamic) {
  std::vector<DynamicEntry> entries(
      std::min<std::size_t>(dynamic.p_filesz / sizeof(DynamicEntry), kMostEntries));
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

/// Reads up to a zero byte, to the end of the file, or kMostLetters - 1 bytes.
std::string read_name(int file, std::uint64_t offset) {
  std::array<char, kMostLetters> room{};
  const ssize_t got = ::pread(file, room.data(), room.size() - 1, static_cast<off_t>(offset));
  return got > 0 ? room.data() : "";
}

}  // namespace

std::vector<std::string> needed_libraries(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) return {};
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

}  // namespace hvd::launcher
