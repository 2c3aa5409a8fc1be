#pragma once

#include <string>
#include <string_view>

namespace hvd::libtorch {

/// Appends a checksum to the bytes. It detects damage, but not attacks.
void append_checksum(std::string& bytes);
/// The bytes without their checksum. @pre append_checksum() was applied to the bytes, or
/// is_intact() is true
std::string_view without_checksum(const std::string& bytes);
/// Whether the bytes match their checksum.
bool is_intact(const std::string& bytes);

}  // namespace hvd::libtorch
