#pragma once

#include <string>
#include <string_view>

namespace hvd::launcher {

/// SHA-256 (FIPS 180-4), as 32 bytes.
std::string sha256(std::string_view message);

/// HMAC-SHA-256 (RFC 2104), in hex: who can make it knows the key, and it does not show the key.
std::string hmac_hex(std::string_view key, std::string_view message);

/// The name and the token of a job as its ranks get them. Made of hvdrun's own token, which
/// programs must not see, and which cannot be found from these.
std::string job_name(std::string_view token);
std::string job_token(std::string_view token);

/// What each side of a connection sends to prove that it has the job's token, without sending it:
/// made of a fresh random number of either side, so that nothing overheard is of use.
std::string launcher_proof(std::string_view token, std::string_view supervisor_nonce,
                           std::string_view launcher_nonce);
std::string supervisor_proof(std::string_view token, std::string_view supervisor_nonce,
                             std::string_view launcher_nonce, int rank);

/// Takes the same time wherever they differ.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace hvd::launcher
