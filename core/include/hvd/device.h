#pragma once

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

}  // namespace hvd
