#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace hvd::bench {

/// hvd's batched copy and the device's timer, for a program that also uses LibTorch's CUDA. This
/// header includes no CUDA and its source no LibTorch, so that no file includes both. Both use the
/// device's primary context.
class PackCall {
 public:
  struct Tensor {
    void* data;           ///< float32, on the device
    std::uint64_t count;  ///< elements
  };
  /// The offset of each tensor in the buffer, in elements, followed by the size of the buffer.
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
  /// The time of one call, averaged over `repeats` calls between two events on the stream.
  Times time(int repeats, const std::function<void()>& call);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace hvd::bench
