#include "bench/peers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "bench/raw_kernels.h"

namespace hvd::bench {
namespace {

constexpr int kRoot = 0;

class OneCall final : public Contender {
 public:
  OneCall(const Exercise& exercise, MPI_Comm communicator)
      : exercise_(exercise), communicator_(communicator) {}
  std::string name() const override { return "mpi"; }

  void run() override {
    float* const in = exercise_.input().data();
    float* const out = exercise_.output().data();
    const auto block = static_cast<int>(exercise_.block());
    switch (exercise_.kind()) {
      case OpKind::kAllreduce:
        MPI_Allreduce(MPI_IN_PLACE, out, block, MPI_FLOAT, MPI_SUM, communicator_);
        break;
      case OpKind::kBroadcast:
        MPI_Bcast(out, block, MPI_FLOAT, kRoot, communicator_);
        break;
      case OpKind::kAllgather:
        MPI_Allgather(in, block, MPI_FLOAT, out, block, MPI_FLOAT, communicator_);
        break;
      case OpKind::kReducescatter:
        MPI_Reduce_scatter_block(in, out, block, MPI_FLOAT, MPI_SUM, communicator_);
        break;
      default:
        MPI_Alltoall(in, block, MPI_FLOAT, out, block, MPI_FLOAT, communicator_);
        break;
    }
  }

 private:
  const Exercise& exercise_;
  MPI_Comm communicator_;
};

/// Calls MPI once per chunk. If the kind divides its data, a chunk holds a piece of every rank's
/// block.
class Chunked final : public Contender {
 public:
  Chunked(const Exercise& exercise, MPI_Comm communicator)
      : exercise_(exercise), communicator_(communicator) {
    const auto ranks = static_cast<std::size_t>(exercise.ranks());
    const std::size_t owners = exercise.count() / exercise.block();
    piece_ = std::max<std::size_t>(1, kChunkBytes / sizeof(float) / owners);
    places_.resize(ranks);
    counts_.resize(ranks);
    if (exercise.kind() == OpKind::kReducescatter) staging_.resize(piece_ * ranks);
  }
  std::string name() const override { return "mpi-chunked"; }

  void run() override {
    for (std::size_t first = 0; first < exercise_.block(); first += piece_) {
      run_piece(first, static_cast<int>(std::min(piece_, exercise_.block() - first)));
    }
  }

 private:
  void run_piece(std::size_t first, int count) {
    float* const in = exercise_.input().data();
    float* const out = exercise_.output().data();
    switch (exercise_.kind()) {
      case OpKind::kAllreduce:
        MPI_Allreduce(MPI_IN_PLACE, out + first, count, MPI_FLOAT, MPI_SUM, communicator_);
        break;
      case OpKind::kBroadcast:
        MPI_Bcast(out + first, count, MPI_FLOAT, kRoot, communicator_);
        break;
      case OpKind::kAllgather:
        lay_out(first, count);
        MPI_Allgatherv(in + first, count, MPI_FLOAT, out, counts_.data(), places_.data(), MPI_FLOAT,
                       communicator_);
        break;
      case OpKind::kReducescatter:
        gather_pieces(first, static_cast<std::size_t>(count));
        MPI_Reduce_scatter_block(staging_.data(), out + first, count, MPI_FLOAT, MPI_SUM,
                                 communicator_);
        break;
      default:
        lay_out(first, count);
        MPI_Alltoallv(in, counts_.data(), places_.data(), MPI_FLOAT, out, counts_.data(),
                      places_.data(), MPI_FLOAT, communicator_);
        break;
    }
  }

  void lay_out(std::size_t first, int count) {
    for (std::size_t rank = 0; rank < places_.size(); ++rank) {
      places_[rank] = static_cast<int>(rank * exercise_.block() + first);
      counts_[rank] = count;
    }
  }

  void gather_pieces(std::size_t first, std::size_t count) {
    for (std::size_t rank = 0; rank < places_.size(); ++rank) {
      std::memcpy(staging_.data() + rank * count,
                  exercise_.input().data() + rank * exercise_.block() + first,
                  count * sizeof(float));
    }
  }

  const Exercise& exercise_;
  MPI_Comm communicator_;
  std::size_t piece_ = 0;
  std::vector<int> places_;
  std::vector<int> counts_;
  std::vector<float> staging_;
};

class Copy final : public Contender {
 public:
  explicit Copy(const Exercise& exercise) : exercise_(exercise) {}
  std::string name() const override { return "copy"; }
  bool does_the_exercise() const override { return false; }

  void run() override {
    std::memcpy(exercise_.spare().data(), exercise_.larger().data(), exercise_.bytes());
    // The copy is never read; this keeps the compiler from removing it.
    asm volatile("" : : "r"(exercise_.spare().data()) : "memory");
  }

 private:
  const Exercise& exercise_;
};

}  // namespace

void allreduce_sum(std::span<float> data, MPI_Comm communicator, std::size_t chunk_bytes) {
  const std::size_t most = chunk_bytes == 0 ? data.size() : chunk_bytes / sizeof(float);
  while (!data.empty()) {
    const std::size_t count = std::min(most, data.size());
    MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                  communicator);
    data = data.subspan(count);
  }
}

std::vector<std::string> peer_names() {
  return {"raw-shared", "raw-staged", "mpi", "mpi-chunked", "copy"};
}

std::vector<std::unique_ptr<Contender>> make_peers(const Exercise& exercise,
                                                   MPI_Comm communicator) {
  std::vector<std::unique_ptr<Contender>> peers;
  if (auto raw = make_raw_kernel(exercise, communicator)) peers.push_back(std::move(raw));
  peers.push_back(std::make_unique<OneCall>(exercise, communicator));
  if (exercise.bytes() > kChunkBytes)
    peers.push_back(std::make_unique<Chunked>(exercise, communicator));
  peers.push_back(std::make_unique<Copy>(exercise));
  return peers;
}

}  // namespace hvd::bench
