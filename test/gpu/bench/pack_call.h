#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace hvd::bench {

/// hvd's batched copy and the clock of the device, for a program that uses LibTorch's CUDA too:
/// this header and its source include neither LibTorch nor, respectively, CUDA, so that the two
/// never meet in one file. The contexts of both are the device's primary one.
class PackCall {
 public:
  struct Tensor {
    void* data;           ///< float32, on the device
    std::uint64_t count;  ///< elements
  };
  /// Where each tensor lies in the buffer, in elements, and what follows the last.
  static std::vector<std::uint64_t> offsets(const std::vector<std::uint64_t>& counts);

  /// @param device ordinal @param buffer float32, on the device @param stream a cudaStream_t
  /// @throws std::runtime_error without a GPU
  PackCall(int device, const std::vector<Tensor>&, void* buffer, void* stream);
  PackCall(const PackCall&) = delete;
  PackCall& operator=(const PackCall&) = delete;
  ~PackCall();

  /// Queues one launch that copies all tensors, multiplied, into the buffer. One thread at a time.
  void run(double factor);
  /// Microseconds.
  struct Times {
    double device = 0;
    double host = 0;  ///< until it is queued
  };
  /// Of one call, over `repeats` back to back between two events on the stream.
  Times time(int repeats, const std::function<void()>& call);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace hvd::bench
