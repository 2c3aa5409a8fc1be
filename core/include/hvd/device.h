#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "hvd/status.h"

/// Tensors on a GPU, for framework adapters and programs of their own. No header of CUDA is needed:
/// a stream is a cudaStream_t, passed as a pointer.
///
/// hvd never waits for the GPU on the caller's thread. A submission carries an event recorded
/// after the work that fills its tensors, and completes with one after which the result is ready:
///
///     submission.input_ready = hvd::record_event(stream);
///     const hvd::Operation operation = hvd::submit(std::move(submission));
///     operation.wait();  // until it is queued on the device, not until it has run
///     operation.status().raise_if_error();
///     // What the stream does next finds the result.
///     hvd::wait_for_event(stream, operation.output_ready());
namespace hvd {

/// The GPU that this rank works with: its local rank modulo the GPUs that the process sees, or
/// HVD_DEVICE. std::nullopt without one.
/// @throws NotInitializedError. Thread-safe, as are all below.
std::optional<int> gpu_index();

/// An event at the stream's position. @throws UsageError without a GPU, or when the stream is
/// being captured into a CUDA graph: operations of hvd cannot be part of one. NotInitializedError.
EventPtr record_event(void* stream);

/// Makes what is queued on the stream from now on wait for the event, on the device; returns at
/// once. Does nothing for a null event.
/// @throws UsageError as record_event(); NotInitializedError.
void wait_for_event(void* stream, const EventPtr& event);

/// Memory of a GPU from a framework's allocator.
struct DeviceBlock {
  /// At least as many bytes as were asked for, 256-byte aligned. Given back with the last copy of
  /// the pointer, which goes when the device is done with the memory, so no stream has to be
  /// recorded as its user; on any thread. Null: there is none from here, and hvd asks CUDA.
  std::shared_ptr<std::byte> memory = nullptr;
  /// What was put into this stream before may still use the memory: hvd's work waits for it, on
  /// the device. Not a stream that may be captured into a CUDA graph.
  void* stream = nullptr;
};

/// The allocator of the framework that the program computes with. Both functions are called on a
/// thread of hvd's that does nothing else and may wait, one call at a time.
struct DeviceMemory {
  /// `bytes` > 0 on the GPU of this index. What it throws is what an operation of hvd fails with,
  /// after a second try behind empty_cache().
  std::function<DeviceBlock(int device, std::size_t bytes)> allocate = {};
  /// Gives the system back what the framework keeps and does not use, as hvd needs memory of that
  /// GPU that cannot come from the framework, such as NCCL's.
  std::function<void(int device)> empty_cache = {};
};

/// From the next hvd::init() on, buffers of hvd's come from there and not from cudaMalloc, whose
/// memory a framework that keeps all of a GPU's would not give it. hvd::torch sets LibTorch's
/// allocator by itself. The functions are kept until the process ends, and have to work for as long
/// as hvd is initialized. Does not throw for functions that are empty: those are not called.
void use_device_memory(DeviceMemory memory);

}  // namespace hvd
