#pragma once

#include <string>
#include <string_view>

namespace hvd::libtorch {

/// A checksum at the end of some bytes. It detects damage, but no attack.
void append_checksum(std::string& bytes);
/// @pre append_checksum() has made the bytes, or is_intact() is true
std::string_view without_checksum(const std::string& bytes);
/// Whether the bytes are those to which append_checksum() was applied.
bool is_intact(const std::string& bytes);

}  // namespace hvd::libtorch
