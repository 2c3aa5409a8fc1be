#pragma once

#include <string>
#include <string_view>

namespace hvd::mpi {

inline constexpr int kNoPeer = -1;

/// What an MPI return code means: "MPI_ERR_TRUNCATE: message truncated".
std::string error_text(int code);

/// Throws hvd::Error unless `code` is MPI_SUCCESS: which call, with which rank, and why. It only
/// ever sees a code because every communicator of ours returns its errors; under MPI's default
/// handler the process would be gone.
void check(int code, std::string_view call, int peer = kNoPeer);

}  // namespace hvd::mpi
