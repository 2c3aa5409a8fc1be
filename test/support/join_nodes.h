#pragma once

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "transport/node/node.h"

namespace hvd::testing {

/// An allgather between ranks that are threads.
class Gathering {
 public:
  explicit Gathering(int size) : size_(size), all_here_(size) {}

  host::Exchange of(int rank) {
    return [this, rank](const void* mine, void* all, std::size_t bytes) {
      if (rank == 0) bytes_.resize(bytes * static_cast<std::size_t>(size_));
      all_here_.arrive_and_wait();
      std::memcpy(bytes_.data() + bytes * static_cast<std::size_t>(rank), mine, bytes);
      all_here_.arrive_and_wait();
      std::memcpy(all, bytes_.data(), bytes_.size());
      all_here_.arrive_and_wait();
    };
  }

 private:
  const int size_;
  std::barrier<> all_here_;
  std::vector<char> bytes_;
};

/// Makes the nodes of a job whose ranks are threads of this process.
/// @param without a rank that has no shared memory, or -1
inline std::vector<std::shared_ptr<host::Node>> join_nodes(int size, int without = -1) {
  Gathering gathering(size);
  std::vector<std::shared_ptr<host::Node>> nodes(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      nodes[static_cast<std::size_t>(rank)] =
          host::Node::join(rank, size, gathering.of(rank), rank != without);
    });
  }
  threads.clear();  // joins
  return nodes;
}

}  // namespace hvd::testing
