#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

/// The GPU as a program uses it: real_device.cpp for CUDA's, simulated_device.cpp for one that is
/// simulated, so that the tests of jobs run on both. What fails throws std::runtime_error.
namespace hvd::testing {

class ProgramDevice {
 public:
  enum class Capture { kThisThread, kAllThreads };

  /// Before hvd::init(). False: there is no GPU.
  static bool prepare(int local_rank);
  /// The program's own device from now on.
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
  static void begin_capture(void* stream, Capture);
  /// False: something has spoilt it.
  static bool end_capture(void* stream);
  /// What a simulated device has found wrong since the last call.
  static std::vector<std::string> take_faults();
  /// More in a tensor take a simulation too long.
  static std::size_t most_floats();
  /// How long a test that measures nothing may repeat its steps.
  static std::chrono::seconds patience();
};

}  // namespace hvd::testing
