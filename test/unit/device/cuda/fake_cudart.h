#pragma once

#include <mutex>
#include <set>
#include <string>
#include <vector>

/// The driver's and the runtime library's functions that core/device/cuda calls, in place of the
/// real ones: they do nothing, but know rules of CUDA's that the simulated device behind
/// device::Api cannot, as they are below it. A program that links fake_cudart.cpp has them, and its
/// dlopen("libcuda.so.1") finds them.
namespace hvd::testing {

struct FakeCudart {
  std::mutex mutex;
  // All of what follows is guarded by mutex.
  /// Another thread is capturing a stream, in CUDA's default mode: what might disturb it is
  /// forbidden on all threads that have not said that they know better, and spoils the capture.
  bool capture_under_way = false;
  std::vector<std::string> spoiled_by = {};
  /// Calls without a context: the runtime library would make one on GPU 0.
  std::vector<std::string> without_context = {};
  std::set<int> retained = {};  ///< primary contexts, by device
  int last_error = 0;           ///< what cudaGetLastError() will say
  int event_query = 0;          ///< what cudaEventQuery() says
  int is_capturing = 0;         ///< what cudaStreamIsCapturing() says
  int free = 0;                 ///< what cudaFree() and its like say
};

FakeCudart& fake_cudart();

/// Of the calling thread.
int fake_capture_mode();
std::size_t fake_context_depth();

}  // namespace hvd::testing
