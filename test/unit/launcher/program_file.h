#pragma once

#include <elf.h>
#include <link.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace hvd::launcher::test {

/// The bytes of a program that consists of its links to these shared libraries.
inline std::string program_that_needs(const std::vector<std::string>& libraries) {
  constexpr std::size_t kAddress = 0x10000;  // of the file's first byte, in memory
  const std::size_t entries_at = sizeof(ElfW(Ehdr)) + 2 * sizeof(ElfW(Phdr));
  const std::size_t names_at = entries_at + (libraries.size() + 2) * sizeof(ElfW(Dyn));
  std::string names(1, '\0'), entries;
  const auto add_entry = [&](auto tag, std::size_t value) {
    ElfW(Dyn) entry{};
    entry.d_tag = tag;
    entry.d_un.d_val = value;
    entries.append(reinterpret_cast<const char*>(&entry), sizeof entry);
  };
  for (const std::string& library : libraries) {
    add_entry(DT_NEEDED, names.size());
    names += library + '\0';
  }
  add_entry(DT_STRTAB, kAddress + names_at);
  add_entry(DT_NULL, 0);

  ElfW(Ehdr) header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_phoff = sizeof header;
  header.e_phentsize = sizeof(ElfW(Phdr));
  header.e_phnum = 2;
  ElfW(Phdr) segments[2] = {};
  segments[0].p_type = PT_LOAD;
  segments[0].p_vaddr = kAddress;
  segments[0].p_filesz = names_at + names.size();
  segments[1].p_type = PT_DYNAMIC;
  segments[1].p_offset = entries_at;
  segments[1].p_filesz = entries.size();
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(reinterpret_cast<const char*>(segments), sizeof segments);
  return bytes + entries + names;
}

inline std::string write_program(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

}  // namespace hvd::launcher::test
