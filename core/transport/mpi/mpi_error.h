#pragma once

#include <string>
#include <string_view>

namespace hvd::mpi {

inline constexpr int kNoPeer = -1;

/// Text of an MPI return code, for example "MPI_ERR_TRUNCATE: message truncated".
std::string error_text(int code);

/// Throws hvd::Error unless `code` is MPI_SUCCESS. The text names the call, the peer and the cause.
/// All communicators of hvd return errors; MPI's default handler would end the process instead.
void check(int code, std::string_view call, int peer = kNoPeer);

}  // namespace hvd::mpi
