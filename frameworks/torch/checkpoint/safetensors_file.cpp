#include "checkpoint/safetensors_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <system_error>

#include "base/text.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

std::string error_text(int number) { return std::generic_category().message(number); }

[[noreturn]] void fail_to_read(const std::string& path, const std::string& reason) {
  throw SafetensorsError(text("cannot read ", path, ": ", reason));
}

/// Opens and maps a whole file. Empty for an empty file, which cannot be mapped.
/// @param file is set, for the caller to close, even when this throws
std::string_view map_file(const std::string& path, int& file) {
  // Opening a pipe without O_NONBLOCK would wait for its writer.
  file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail_to_read(path, error_text(errno));
  struct stat status {};
  if (::fstat(file, &status) != 0) fail_to_read(path, error_text(errno));
  if (S_ISDIR(status.st_mode)) fail_to_read(path, "it is a folder; expected a file");
  if (!S_ISREG(status.st_mode)) fail_to_read(path, "it is a pipe or a device; expected a file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return {};
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) fail_to_read(path, error_text(errno));
  return {static_cast<const char*>(memory), size};
}

}  // namespace

MappedSafetensors::MappedSafetensors(const std::filesystem::path& path) : path_(path.string()) {
  try {
    mapped_ = map_file(path_, file_);
    header_ = SafetensorsHeader::decode(mapped_, path_);
    by_name_.reserve(header_.tensors.size());
    for (const SafetensorsEntry& entry : header_.tensors) by_name_.emplace(entry.name, &entry);
  } catch (...) {
    close();
    throw;
  }
}

MappedSafetensors::~MappedSafetensors() { close(); }

void MappedSafetensors::close() {
  if (!mapped_.empty()) ::munmap(const_cast<char*>(mapped_.data()), mapped_.size());
  if (file_ >= 0) ::close(file_);
}

const SafetensorsEntry* MappedSafetensors::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

void MappedSafetensors::load(const SafetensorsEntry& entry) const {
  const std::string_view wanted = bytes(entry);
  if (wanted.empty()) return;
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of newer headers
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto before = static_cast<std::size_t>(wanted.data() - mapped_.data()) % page;
  char* const begin = const_cast<char*>(wanted.data()) - before;
  int result = -1;
  do {
    result = ::madvise(begin, wanted.size() + before, kPopulateRead);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EINVAL) fail_to_load(entry, error_text(errno));
  check_values(entry, wanted);
}

void MappedSafetensors::read(const SafetensorsEntry& entry, std::uint64_t offset,
                             std::uint64_t bytes, char* memory) const {
  std::uint64_t position = header_.bytes + entry.begin + offset;
  while (bytes > 0) {
    const ssize_t got = ::pread(file_, memory, bytes, static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_to_load(entry, error_text(errno));
    if (got == 0) fail_to_load(entry, "the file ends");
    memory += got;
    position += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

void MappedSafetensors::check_values(const SafetensorsEntry& entry, std::string_view values) const {
  if (entry.type != SafetensorsType::kBool) return;
  if (std::any_of(values.begin(), values.end(),
                  [](char value) { return value != 0 && value != 1; }))
    throw SafetensorsError(text(path_, ": tensor ", printable(entry.name),
                                " of dtype BOOL has a byte that is neither 0 nor 1"));
}

void MappedSafetensors::fail_to_load(const SafetensorsEntry& entry,
                                     const std::string& reason) const {
  throw SafetensorsError(text("cannot read tensor ", printable(entry.name), " of ", path_, ": ",
                              reason, "; is the disk damaged, or was the file shortened?"));
}

}  // namespace hvd::libtorch
