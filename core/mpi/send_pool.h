#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace hvd::mpi {

/// Buffers of messages on their way. A message is copied once, however many ranks it goes to.
///
/// Not thread-safe: the thread that drives the engine. What is still under way when the pool is
/// destroyed is leaked: MPI may read it.
class SendPool {
 public:
  explicit SendPool(MPI_Comm communicator) : communicator_(communicator) {}
  SendPool(const SendPool&) = delete;
  SendPool& operator=(const SendPool&) = delete;
  ~SendPool();

  /// Starts to send a copy of `message` to each of `ranks`.
  void send(std::span<const std::byte> message, std::span<const int> ranks, int tag);
  /// Recycles what has been sent; `ranks_done(ranks)` is called for each message that completed
  /// here and not at once: its receivers may have gone to sleep meanwhile.
  template <typename RanksDone>
  void retire(RanksDone&& ranks_done) {
    for (std::size_t index = 0; index < active_.size();) {
      if (!finished(*active_[index])) {
        ++index;
        continue;
      }
      ranks_done(std::span<const int>(active_[index]->ranks));
      recycle(index);
    }
  }
  bool empty() const noexcept { return active_.empty(); }

 private:
  struct Parcel {
    std::vector<std::byte> bytes = {};
    std::vector<int> ranks = {};
    std::vector<MPI_Request> requests = {};
  };
  bool finished(Parcel&);
  void recycle(std::size_t index);

  MPI_Comm communicator_;
  std::vector<std::unique_ptr<Parcel>> active_;
  std::vector<std::unique_ptr<Parcel>> idle_;
};

}  // namespace hvd::mpi
