#pragma once

#include <mutex>
#include <set>
#include <string>
#include <vector>

/// Replacements for the functions of the driver and the runtime library that core/device/cuda
/// calls. They do no work, but check rules of CUDA that the simulated device above device::Api
/// cannot check. A program that links fake_cudart.cpp uses them, and its dlopen("libcuda.so.1")
/// finds them.
namespace hvd::testing {

struct FakeCudart {
  std::mutex mutex;
  // mutex guards the following members.
  /// Whether another thread is capturing a stream in CUDA's default mode. Unsafe calls of threads
  /// that are not in the relaxed mode then fail and invalidate the capture.
  bool capture_under_way = false;
  std::vector<std::string> spoiled_by = {};
  /// Calls without a context, for which the runtime library would create one on GPU 0.
  std::vector<std::string> without_context = {};
  std::set<int> retained = {};  ///< primary contexts, by device
  int last_error = 0;           ///< result of cudaGetLastError()
  int event_query = 0;          ///< result of cudaEventQuery()
  int is_capturing = 0;         ///< result of cudaStreamIsCapturing()
  int free = 0;                 ///< result of cudaFree() and similar calls
};

FakeCudart& fake_cudart();

/// The capture mode and the number of contexts of the calling thread.
int fake_capture_mode();
std::size_t fake_context_depth();

}  // namespace hvd::testing
