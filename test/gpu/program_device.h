#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

/// The program's own use of the GPU. real_device.cpp implements it with CUDA, simulated_device.cpp
/// with a simulated GPU, so that the tests of jobs run on both. Errors throw std::runtime_error.
namespace hvd::testing {

class ProgramDevice {
 public:
  enum class Capture { kThisThread, kAllThreads };

  /// Call before hvd::init(). @return false without a GPU
  static bool prepare(int local_rank);
  /// Makes the rank's device the program's current one.
  static void use(int device);
  static std::byte* allocate(std::size_t bytes);
  /// Waits for the device.
  static void release(std::byte*);
  static void* create_stream();
  static void destroy_stream(void*);
  static void copy_in(std::byte* to, const void* from, std::size_t bytes, void* stream);
  /// Waits for the stream.
  static void copy_out(void* to, const std::byte* from, std::size_t bytes, void* stream);
  static void synchronize(void* stream);
  /// Queues work that never ends. Only a simulated device has it.
  static void hang(void* stream);
  static void begin_capture(void* stream, Capture);
  /// @return false if another call has invalidated the capture
  static bool end_capture(void* stream);
  /// Faults that the simulated device has found since the last call.
  static std::vector<std::string> drain_faults();
  /// Limit of elements per tensor, because a simulation is slow.
  static std::size_t max_floats();
  /// Limit for tests that repeat steps.
  static std::chrono::seconds time_limit();
};

}  // namespace hvd::testing
