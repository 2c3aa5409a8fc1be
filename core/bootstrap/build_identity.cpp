#include "bootstrap/build_identity.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace hvd::runtime {
namespace {

constexpr std::size_t kShownBytes = 8;

std::size_t padded(std::size_t size) noexcept { return (size + 3) & ~std::size_t{3}; }

/// The build id in the notes of one segment; empty if the notes have no build id.
std::string build_in_notes(const std::byte* at, std::size_t left) {
  while (left >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, at, sizeof note);
    const std::size_t name_at = sizeof note;
    const std::size_t id_at = name_at + padded(note.n_namesz);
    const std::size_t end = id_at + padded(note.n_descsz);
    if (end > left) return {};
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
        std::memcmp(at + name_at, "GNU", 4) == 0) {
      std::string hex;
      for (std::size_t i = 0; i < note.n_descsz && i < kShownBytes; ++i) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(at[id_at + i]));
        hex += two;
      }
      return hex;
    }
    at += end;
    left -= end;
  }
  return {};
}

struct Search {
  std::uintptr_t inside = 0;  ///< an address in the object to inspect
  std::string build = {};
};

int inspect_object(dl_phdr_info* object, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool ours = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    const std::uintptr_t first = object->dlpi_addr + segment.p_vaddr;
    ours = ours || (segment.p_type == PT_LOAD && search.inside >= first &&
                    search.inside - first < segment.p_memsz);
  }
  if (!ours) return 0;
  for (int i = 0; i < object->dlpi_phnum && search.build.empty(); ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    search.build = build_in_notes(
        reinterpret_cast<const std::byte*>(object->dlpi_addr + segment.p_vaddr), segment.p_filesz);
  }
  return 1;
}

}  // namespace

std::string build_identity() {
  Search search{.inside = reinterpret_cast<std::uintptr_t>(&inspect_object)};
  dl_iterate_phdr(inspect_object, &search);
  return std::string(HVD_VERSION) + (search.build.empty() ? "" : " (build " + search.build + ")");
}

}  // namespace hvd::runtime
