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

[[noreturn]] void fail_to_read(const std::string& path, int number) {
  throw SafetensorsError(text("cannot read ", path, ": ", std::generic_category().message(number)));
}

/// Maps a whole file. Empty for an empty file, which cannot be mapped.
std::string_view map_file(const std::string& path) {
  // Opening a pipe without O_NONBLOCK would wait for its writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail_to_read(path, errno);
  struct stat status {};
  int error = ::fstat(file, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : ESPIPE;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* memory = MAP_FAILED;
  if (error == 0 && size > 0) {
    memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED) error = errno;
  }
  ::close(file);
  if (error != 0) fail_to_read(path, error);
  return size == 0 ? std::string_view() : std::string_view(static_cast<const char*>(memory), size);
}

void unmap(std::string_view mapped) {
  if (!mapped.empty()) ::munmap(const_cast<char*>(mapped.data()), mapped.size());
}

}  // namespace

MappedSafetensors::MappedSafetensors(const std::filesystem::path& path)
    : path_(path.string()), mapped_(map_file(path_)) {
  try {
    header_ = SafetensorsHeader::decode(mapped_, path_);
    by_name_.reserve(header_.tensors.size());
    for (const SafetensorsEntry& entry : header_.tensors) by_name_.emplace(entry.name, &entry);
  } catch (...) {
    unmap(mapped_);
    throw;
  }
}

MappedSafetensors::~MappedSafetensors() { unmap(mapped_); }

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
  if (result != 0 && errno != EINVAL) {
    throw SafetensorsError(text("cannot read tensor ", printable(entry.name), " of ", path_, ": ",
                                std::generic_category().message(errno),
                                "; is the disk damaged, or was the file shortened?"));
  }
  if (entry.type != SafetensorsType::kBool) return;
  if (std::any_of(wanted.begin(), wanted.end(),
                  [](char value) { return value != 0 && value != 1; }))
    throw SafetensorsError(text(path_, ": tensor ", printable(entry.name),
                                " of dtype BOOL has a byte that is neither 0 nor 1"));
}

}  // namespace hvd::libtorch
