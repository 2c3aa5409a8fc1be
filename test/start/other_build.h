#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace hvd::testing {

/// A copy of hvd's library with another build id; empty if the library has no build id.
inline std::filesystem::path library_of_another_build(const std::filesystem::path& library,
                                                      const std::filesystem::path& folder) {
  std::ifstream original(library, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(original)), {});
  using namespace std::string_literals;
  const std::string note = "\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0"s;  // with an id of 20 bytes
  const auto at = bytes.find(note);
  if (at == std::string::npos) return {};
  bytes[at + note.size()] = static_cast<char>(bytes[at + note.size()] + 1);
  const auto changed = folder / "libhvd_core.so";
  std::ofstream(changed, std::ios::binary) << bytes;
  return changed;
}

}  // namespace hvd::testing
