#pragma once

#include <string>
#include <string_view>

namespace hvd {

/// SHA-256 (FIPS 180-4) of a message, as 32 bytes.
std::string sha256(std::string_view message);

/// HMAC-SHA-256 (RFC 2104) of a message, as 64 hexadecimal digits. It proves that the sender has
/// the key, and does not reveal the key.
std::string hmac_hex(std::string_view key, std::string_view message);

/// Compares two secrets in a time that does not depend on where they differ.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace hvd
