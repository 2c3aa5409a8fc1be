#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace hvd::bench {

/// A stream of bytes between two processes that uses a carrier's own calls, as a program without
/// hvd would. Not thread-safe.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Sends `out` and receives `in` at the same time, and returns when both are complete. Polls, and
  /// yields its core in between. @throws std::runtime_error
  virtual void exchange(std::span<const std::byte> out, std::span<std::byte> in) = 0;
};

/// Makes a stream that uses MPI_Isend and MPI_Irecv. @pre two ranks
std::unique_ptr<Stream> make_mpi_stream(MPI_Comm);

/// Makes a stream of UCX tag messages, with its own worker and its own endpoint, which reports
/// errors like hvd's. Uses UCX's default settings, except for process-wide settings, which hvd has
/// changed. Call it after hvd has been in a job over UCX. The ranks exchange addresses over MPI.
/// @pre two ranks @throws std::runtime_error when the library cannot be used
std::unique_ptr<Stream> make_ucx_stream(MPI_Comm);

using Bytes = std::vector<std::byte>;
/// Sends the bytes to the peer and returns the peer's bytes.
using Swap = Bytes (*)(const Bytes&, void* context);

/// The function of ucx_stream.cpp. That file is in a separate library, because it links UCX. UCX
/// reads its settings when it is loaded, and hvd must set some of them before.
using OpenUcxStream = Stream* (*)(Swap, void* context);
inline constexpr const char* kOpenUcxStream = "hvd_bench_open_ucx_stream";

}  // namespace hvd::bench
