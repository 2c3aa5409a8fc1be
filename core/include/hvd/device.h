#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "hvd/status.h"

/// Tensors on a GPU, for framework adapters and for programs that use CUDA directly. No header of
/// CUDA is needed: a stream is a cudaStream_t, passed as a pointer.
///
/// hvd never waits for the GPU on the caller's thread, except in wait_on_host(). A submission
/// carries an event recorded after the work that fills its tensors, and completes with one after
/// which the result is ready:
///
///     submission.input_ready = hvd::record_event(stream);
///     const hvd::Operation operation = hvd::submit(std::move(submission));
///     operation.wait();  // until it is queued on the device, not until it has run
///     operation.status().raise_if_error();
///     // Later work on the stream finds the result.
///     hvd::wait_for_event(stream, operation.output_ready());
namespace hvd {

/// @addtogroup adapters
/// @{

/// The index of this rank's GPU: HVD_DEVICE if it is set, otherwise the local rank modulo the
/// number of GPUs that the process sees. std::nullopt without a GPU. @throws NotInitializedError.
/// Thread-safe, like all functions below.
std::optional<int> gpu_index();

/// Records an event at the stream's current position. @throws UsageError without a GPU, or when the
/// stream is being captured into a CUDA graph: operations of hvd cannot be part of one.
/// NotInitializedError.
EventPtr record_event(void* stream);

/// Makes all work that is queued on the stream from now on wait for the event, on the device.
/// Returns at once. No effect for a null event.
/// @throws UsageError as record_event(); NotInitializedError.
void wait_for_event(void* stream, const EventPtr& event);

/// Waits until the device has reached the event, or the job has failed. A failure ends the
/// collectives that are queued on the device; their results are then undefined, but later work on
/// the device still runs. A program that is to survive the loss of a rank therefore calls this
/// before work that cannot be undone, such as an optimizer's step. Returns at once for a null
/// event.
/// @throws the cause of failure, even if the event was reached; NotInitializedError.
void wait_on_host(const EventPtr& event);

/// Memory of a GPU from a framework's allocator.
struct DeviceBlock {
  /// At least as many bytes as requested, 256-byte aligned. Freed with the last copy of the
  /// pointer, on any thread, once the device is done with the memory, so no stream has to be
  /// recorded as its user. Null: the allocator has no memory, and hvd calls cudaMalloc.
  std::shared_ptr<std::byte> memory = nullptr;
  /// Work that was queued on this stream earlier may still use the memory, and hvd's work waits for
  /// it on the device. Must not be a stream that may be captured into a CUDA graph.
  void* stream = nullptr;
};

/// The allocator of the program's framework. hvd calls both functions on a thread that has no other
/// work and may block, one call at a time.
struct DeviceMemory {
  /// Allocates `bytes` > 0 on the GPU of this index. After an exception hvd calls empty_cache() and
  /// tries again; the exception of the second call is the operation's error.
  std::function<DeviceBlock(int device, std::size_t bytes)> allocate = {};
  /// Returns the framework's unused memory of that GPU to the system, because hvd needs memory that
  /// cannot be the framework's, such as NCCL's.
  std::function<void(int device)> empty_cache = {};
};

/// Makes hvd allocate its GPU buffers with these functions from the next hvd::init() on, instead of
/// cudaMalloc, which fails if a framework holds all memory of the GPU. hvd::torch sets LibTorch's
/// allocator by itself. The functions are kept until the process ends, and must work for as long as
/// hvd is initialized. Empty functions are not called.
void use_device_memory(DeviceMemory memory);

/// @}

}  // namespace hvd
