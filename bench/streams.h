#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace hvd::bench {

/// A stream of bytes between two processes by a carrier's own calls, as a plain program would make
/// them, without hvd. Not thread-safe.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Sends and receives as many bytes, both at once, and returns when both are over. Polls, and
  /// gives its core away in between. @throws std::runtime_error
  virtual void exchange(std::span<const std::byte> out, std::span<std::byte> in) = 0;
};

/// MPI_Isend and MPI_Irecv. @pre two ranks
std::unique_ptr<Stream> make_mpi_stream(MPI_Comm);

/// Tag messages of UCX, on a worker and an endpoint (that reports errors, as hvd's do) of their
/// own, with UCX's own settings but for those that concern the whole process, which hvd has made.
/// Used once hvd has been in a job over UCX. Addresses travel over MPI.
/// @pre two ranks @throws std::runtime_error when the library cannot be used
std::unique_ptr<Stream> make_ucx_stream(MPI_Comm);

using Bytes = std::vector<std::byte>;
/// Sends the bytes to the peer and returns the peer's bytes.
using Swap = Bytes (*)(const Bytes&, void* context);

/// The function of ucx_stream.cpp, which is in a library of its own: it links UCX, which reads its
/// settings when it is loaded, and hvd sets some of them before.
using OpenUcxStream = Stream* (*)(Swap, void* context);
inline constexpr const char* kOpenUcxStream = "hvd_bench_open_ucx_stream";

}  // namespace hvd::bench
