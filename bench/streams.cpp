#include "bench/streams.h"

#include <dlfcn.h>

#include <stdexcept>

namespace hvd::bench {
namespace {

int peer_of(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return 1 - rank;
}

class MpiStream final : public Stream {
 public:
  explicit MpiStream(MPI_Comm communicator)
      : communicator_(communicator), peer_(peer_of(communicator)) {}

  void exchange(std::span<const std::byte> out, std::span<std::byte> in) override {
    MPI_Request requests[2];
    MPI_Irecv(in.data(), static_cast<int>(in.size()), MPI_BYTE, peer_, 0, communicator_,
              &requests[0]);
    MPI_Isend(out.data(), static_cast<int>(out.size()), MPI_BYTE, peer_, 0, communicator_,
              &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  }

 private:
  const MPI_Comm communicator_;
  const int peer_;
};

Bytes swap_over_mpi(const Bytes& own, void* context) {
  const MPI_Comm communicator = *static_cast<const MPI_Comm*>(context);
  const int peer = peer_of(communicator);
  int mine = static_cast<int>(own.size());
  int theirs = 0;
  MPI_Sendrecv(&mine, 1, MPI_INT, peer, 0, &theirs, 1, MPI_INT, peer, 0, communicator,
               MPI_STATUS_IGNORE);
  Bytes given(static_cast<std::size_t>(theirs));
  MPI_Sendrecv(own.data(), mine, MPI_BYTE, peer, 0, given.data(), theirs, MPI_BYTE, peer, 0,
               communicator, MPI_STATUS_IGNORE);
  return given;
}

}  // namespace

std::unique_ptr<Stream> make_mpi_stream(MPI_Comm communicator) {
  return std::make_unique<MpiStream>(communicator);
}

std::unique_ptr<Stream> make_ucx_stream(MPI_Comm communicator) {
  const std::string path = HVD_BENCH_UCX_STREAM;
  if (path.empty())
    throw std::runtime_error("hvd-bench was built without libucp (Debian: libucx-dev)");
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = library == nullptr ? nullptr : dlsym(library, kOpenUcxStream);
  if (found == nullptr) {
    throw std::runtime_error(std::string("the plain stream over UCX cannot be loaded: ") +
                             dlerror());
  }
  const auto open = reinterpret_cast<OpenUcxStream>(found);
  return std::unique_ptr<Stream>(open(swap_over_mpi, &communicator));
}

}  // namespace hvd::bench
