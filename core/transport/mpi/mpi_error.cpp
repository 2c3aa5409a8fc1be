#include "transport/mpi/mpi_error.h"

#include <mpi.h>

#include <array>

#include "hvd/error.h"

namespace hvd::mpi {

std::string error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS || length <= 0) {
    return "MPI error code " + std::to_string(code);
  }
  return std::string(text.data(), static_cast<std::size_t>(length));
}

void check(int code, std::string_view call, int peer) {
  if (code == MPI_SUCCESS) return;
  std::string message(call);
  if (peer != kNoPeer) message += " with rank " + std::to_string(peer);
  message += " failed: " + error_text(code);
  message += "; the job cannot go on, look for the first error among the ranks' logs";
  throw Error(message);
}

}  // namespace hvd::mpi
